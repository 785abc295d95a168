#!/usr/bin/env bash
# Creates an environment for each Python version of setup.sh and trains the quickstart's first steps in it. Versions that
# this machine lacks are listed. Runs no tests.
#
#   bash end_to_end/pythons.sh [VERSION ...]     about two minutes for each, with packages from pip's cache
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [[ $# -eq 0 ]]; then
  read -ra versions <<<"$(sed -n 's/^PYTHONS="\(.*\)"$/\1/p' setup.sh)"
  set -- "${versions[@]}"
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
tried=0
for version in "$@"; do
  code=0
  PYTHON=$version VENV=$out/$version bash setup.sh >"$out/log" 2>&1 || code=$?
  if [[ $code -ne 0 ]]; then
    tail -n 1 "$out/log"
    if grep -q "neither PATH nor pyenv nor uv" "$out/log"; then continue; fi
    exit 1
  fi
  "$out/$version/bin/python" -m src.train configs/quickstart.yml steps=40 eval_interval=40 base_output_directory="$out" \
    run_name="run-$version"
  echo "Python $version: $("$out/$version/bin/python" -c 'import jax; print("JAX", jax.__version__)')"
  loss_fell "$out/run-$version"
  tried=$((tried + 1))
  rm -rf "${out:?}/$version"
done
[[ $tried -gt 0 ]] || skip "none of these Pythons is here: $*"
