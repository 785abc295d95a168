#!/usr/bin/env bash
# Runs all scripts here, or the given ones, and prints PASS, FAIL or SKIP for each, with the reason. The output of a
# script goes to a log. The exit code is 1 if any failed.
#
#   bash end_to_end/all.sh [SCRIPT ...]
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
logs=$(mktemp -d)
if [[ $# -eq 0 ]]; then
  for script in "$here"/*.sh; do
    # Scripts to run, rather than source, begin with the interpreter; leave out this one.
    if [[ "$(head -c 2 "$script")" == "#!" && "$script" != "$here/all.sh" ]]; then set -- "$@" "$script"; fi
  done
fi
failed=0
for script in "$@"; do
  name=$(basename "$script" .sh)
  start=$SECONDS
  bash "$script" >"$logs/$name.log" 2>&1
  code=$?
  took="$((SECONDS - start)) s"
  case $code in
    0) echo "PASS  $name  ($took)" ;;
    77) echo "SKIP  $name  $(sed -n 's/^SKIP: //p' "$logs/$name.log" | tail -n 1)" ;;
    *)
      echo "FAIL  $name  ($took)  exit code $code: $(tail -n 1 "$logs/$name.log")  (all of it: $logs/$name.log)"
      failed=1
      ;;
  esac
done
exit $failed
