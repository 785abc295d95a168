#!/usr/bin/env bash
# Compiles every recipe (configs/recipes) ahead of time. Each must fit its devices, by the verdict of src.train_compile or
# by the compiler's own count alone, and then both are said; and XLA must not copy an array to every device because it
# knows no better way from one sharding to the next. Ends with the table of docs/recipes.md.
#
#   bash end_to_end/recipes.sh [RECIPE ...]     an hour on two cores and 6 GiB; RECIPEs choose some
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
needs_compilers
out=$(mktemp -d)
failed=0
if [[ $# -eq 0 ]]; then set -- $(basename -s .yml configs/recipes/*.yml); fi
fits_by_the_compilers_count() {
  "$python" -c 'import json, sys; of = json.load(open(sys.argv[1]))["memory"]; sys.exit(of.get("peak", 1e99) > of["capacity"])' "$1"
}
for name in "$@"; do
  code=0
  "$python" -m src.train_compile "configs/recipes/$name.yml" compile_report="$out/$name.json" >"$out/$name.log" 2>&1 ||
    code=$?
  said="fits"
  if [[ $code -eq 3 ]] && fits_by_the_compilers_count "$out/$name.json"; then
    code=0
    said="$(grep -m 1 verdict "$out/$name.log"); $(grep -m 1 "by the compiler's own count" "$out/$name.log")"
  fi
  if [[ $code -ne 0 ]]; then
    echo "$name: exit code $code: $(grep -m 1 verdict "$out/$name.log" || tail -n 1 "$out/$name.log")"
    echo "  all of it: $out/$name.log"
    failed=1
  elif grep -q "Involuntary full rematerialization" "$out/$name.log"; then
    echo "$name: XLA copies whole arrays: $(grep -m 1 "Involuntary full" "$out/$name.log")"
    failed=1
  else
    echo "$name: $said" | tr -s " "
  fi
done
"$python" scripts/recipes.py "$out"
exit $failed
