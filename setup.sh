#!/usr/bin/env bash
# Creates .venv in this folder and installs the pinned requirements into it:
#
#   bash setup.sh              packages for training on a CPU
#   bash setup.sh tpu|gpu      also those for a Cloud TPU VM or a machine with NVIDIA GPUs
#   bash setup.sh aot          also the compilers for TPUs and GPUs, for any machine (src.train_compile)
#   bash setup.sh data         also readers for data of the types array_record, tfds and parquet
#   bash setup.sh streams      also Hugging Face's datasets and Grain: data of the type hf, and streams
#   bash setup.sh trackers     also Weights & Biases and MLflow (report_to)
#   bash setup.sh eval         also lm-evaluation-harness and packages for its tasks (src.evaluate RUN tasks=...)
#   bash setup.sh dev          also packages for the tests, the linter, the type checker and the notebook
#
# Names combine (bash setup.sh gpu dev) and add up over several calls. If everything is installed, it takes a second.
# It uses the first version of PYTHONS below that PATH, pyenv or uv has. PYTHON="3.12 3.13" tries other versions, and
# PYTHON=/path/to/python uses that program. VENV=.venv-3.12 creates the environment in that folder instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The versions for which requirements/ pins packages. .ci/run runs all tests on the first, whose pins the next two share;
# 3.11 has an older JAX.
PYTHONS="3.13 3.12 3.14 3.11"
venv=${VENV:-.venv}

fail() {
  echo "setup.sh: $1" >&2
  exit 2
}

# version PROGRAM: prints its version, such as 3.13, if it is CPython with the GIL, for which packages have wheels.
# Prints nothing for a program that does not run, such as an inactive pyenv shim on PATH.
version() {
  "$1" - 2>/dev/null <<'PYTHON' || true
import sys, sysconfig
if sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("%d.%d" % sys.version_info[:2])
PYTHON
}

# find_python: prints the program that PYTHON names, or the first one found of the wanted versions.
find_python() {
  local wanted=${PYTHON:-$PYTHONS} each candidate
  if [[ ! "$wanted" =~ ^[0-9.\ ]+$ ]]; then
    [[ " $PYTHONS " == *" $(version "$wanted") "* ]] || fail "PYTHON=$wanted is not a Python of these versions: $PYTHONS"
    echo "$wanted"
    return
  fi
  for each in $wanted; do
    [[ " $PYTHONS " == *" $each "* ]] || fail "PYTHON=$each is not one of the versions $PYTHONS"
    for candidate in "python$each" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$each."*/bin/python3 \
      "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}/cpython-$each."*/bin/python3; do
      if [[ "$(version "$candidate")" == "$each" ]]; then
        echo "$candidate"
        return
      fi
    done
  done
  fail "neither PATH nor pyenv nor uv has a Python of these versions: $wanted; python3 is $(python3 --version 2>&1 || true). If one is elsewhere: PYTHON=/path/to/python3 bash setup.sh"
}

for name in "$@"; do
  [[ "$name" =~ ^(tpu|gpu|aot|data|streams|trackers|eval|dev)$ ]] || fail "'$name' is not one of tpu, gpu, aot, data, streams, trackers, eval, dev"
done

if [[ ! -x $venv/bin/python ]]; then
  python="$(find_python)"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    fail "'$python -m venv $venv' failed (on Debian and Ubuntu: apt install python3-venv)"
  fi
elif [[ -n "${PYTHON:-}" ]]; then
  wanted=$PYTHON has=$(version "$venv/bin/python")
  [[ "$wanted" =~ ^[0-9.\ ]+$ ]] || wanted=$(version "$PYTHON")
  [[ " $wanted " == *" $has "* ]] || fail "$venv has Python $has, but PYTHON=$PYTHON asks for another: remove $venv, or set VENV to another folder"
fi

# $venv/installed keeps a copy of each installed requirements file. An unchanged file is skipped; a changed one is
# installed again even if it is not named, because a new JAX does not work with the plugin of an old one.
mkdir -p "$venv/installed"
asked=" base $* "
is_due() {
  local file="requirements/$1.txt" copy="$venv/installed/$1.txt"
  [[ "$asked" == *" $1 "* || -f "$copy" ]] && ! cmp -s "$file" "$copy"
}
install() {
  echo "setup.sh: installing $1 for $("$venv/bin/python" --version); a minute or more"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check "${@:2}"
}

to_install=()
for name in base tpu gpu data streams trackers eval dev; do
  if is_due "$name"; then
    to_install+=("requirements/$name.txt")
  fi
done
if [[ ${#to_install[@]} -gt 0 ]]; then
  install "${to_install[*]}" "${to_install[@]/#/--requirement=}"
  cp "${to_install[@]}" "$venv/installed/"
fi
if is_due aot; then
  rm -rf "$venv/aot" # src/extras/aot/compilers.py explains why they have their own folder
  install requirements/aot.txt --no-deps --target="$venv/aot" --requirement=requirements/aot.txt
  cp requirements/aot.txt "$venv/installed/"
fi
echo "setup.sh: $venv is ready; train with $venv/bin/python -m src.train configs/quickstart.yml"
