# Shared by the launchers (sourced, not run): the repository's root, errors, --help, --dry-run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry_run=false

fail() {
  echo "${0##*/}: $1" >&2
  exit 2
}

# Prints the opening comment of a script.
show_help() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[1]}"; }

# quoted WORD...: prints the words as one line, quoted for a shell.
quoted() {
  local word line='' quote="'" escaped="'\\''"
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=$quote${word//$quote/$escaped}$quote
    line+="${line:+ }$word"
  done
  echo "$line"
}

# run_or_print COMMAND: runs the command; a dry run prints it.
run_or_print() {
  if $dry_run; then quoted "$@"; else "$@"; fi
}

# Prints the files in the working tree that git tracks, one per line.
tracked_files='{ git -c core.quotepath=off ls-files; git -c core.quotepath=off ls-files --deleted; } | sort | uniq -u'

# A restarted run only resumes if its name is the same.
check_resumes() {
  if [[ " $* " == *" src.train "* && " $* " != *" run_name="* ]]; then
    fail "the command has no run_name=NAME, which a restarted run needs to resume: add one"
  fi
}
