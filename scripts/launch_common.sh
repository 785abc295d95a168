# What the launchers share (it is sourced, not run): the repository's root, errors, --help, --dry-run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry_run=false

fail() {
  echo "${0##*/}: $1" >&2
  exit 2
}

# Prints the comment that a script begins with.
show_help() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[1]}"; }

# quoted WORD...: one line that a shell reads as these words.
quoted() {
  local word line='' quote="'" escaped="'\\''"
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=$quote${word//$quote/$escaped}$quote
    line+="${line:+ }$word"
  done
  echo "$line"
}

# run_or_print COMMAND: runs it; a dry run prints it.
run_or_print() {
  if $dry_run; then quoted "$@"; else "$@"; fi
}

# The files that git tracks, as they are in the working tree, one per line.
tracked_files='{ git -c core.quotepath=off ls-files; git -c core.quotepath=off ls-files --deleted; } | sort | uniq -u'

# A run that is started again after an interruption goes on only where its name is the same.
check_resumes() {
  if [[ " $* " == *" src.train "* && " $* " != *" run_name="* ]]; then
    fail "the command has no run_name=NAME, by which a run that is started again goes on: add one"
  fi
}
