#!/usr/bin/env bash
# Runs the tests that take minutes, which plain pytest leaves out: four models on every mesh, in one process and between
# two and four; checkpoints from mesh to mesh; a run killed ten times on one device and on eight; twenty verdicts of
# src.train_compile against the compiler's own; and further meshes, families and compilations of kinds of which plain
# pytest has one or two. Every second file runs in .venv-3.11, if .ci/run or you have made that, and the next time, by
# TURN or else by the number of commits, those between.
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
