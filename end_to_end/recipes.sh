#!/usr/bin/env bash
# Compiles every recipe (configs/recipes) ahead of time. Each must fit its devices, and XLA must not replicate a whole
# array to change its sharding. Prints the table of docs/recipes.md.
#
#   bash end_to_end/recipes.sh [RECIPE ...]     an hour on two cores and 6 GiB; RECIPEs selects some
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
needs_compilers
out=$(mktemp -d)
failed=0
if [[ $# -eq 0 ]]; then set -- $(basename -s .yml configs/recipes/*.yml); fi
for name in "$@"; do
  code=0
  "$python" -m src.train_compile "configs/recipes/$name.yml" compile_report="$out/$name.json" >"$out/$name.log" 2>&1 ||
    code=$?
  if [[ $code -ne 0 ]]; then
    echo "$name: exit code $code: $(grep -m 1 verdict "$out/$name.log" || tail -n 1 "$out/$name.log")"
    echo "  all of it: $out/$name.log"
    failed=1
  elif grep -q "Involuntary full rematerialization" "$out/$name.log"; then
    echo "$name: XLA copies whole arrays: $(grep -m 1 "Involuntary full" "$out/$name.log")"
    failed=1
  else
    echo "$name: fits"
  fi
done
"$python" scripts/evidence/recipes.py "$out"
exit $failed
