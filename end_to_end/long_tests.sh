#!/usr/bin/env bash
# Runs the tests that take minutes, which plain pytest leaves out: four models on every mesh, in one, two and four
# processes; checkpoints moved between meshes; a run killed ten times on one device and on eight; twenty verdicts of
# src.train_compile compared with the compiler's own; and more meshes, families and compilations than plain pytest has.
# If .venv-3.11 exists (.ci/run creates it), every second file runs there; the parity of TURN, or else of the number of
# commits, decides which half.
#
#   bash end_to_end/long_tests.sh     about two hours on two cores
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
turn=${TURN:-$(git rev-list --count HEAD)}
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.long' tests | sort)
newer=() older=()
for index in "${!files[@]}"; do
  if [[ -x .venv-3.11/bin/python && $(((index + turn) % 2)) -eq 0 ]]; then
    older+=("${files[index]}")
  else
    newer+=("${files[index]}")
  fi
done
failed=0
"$python" -m pytest -m long "${newer[@]}" || failed=1
if [[ ${#older[@]} -gt 0 ]]; then .venv-3.11/bin/python -m pytest -m long "${older[@]}" || failed=1; fi
exit $failed
