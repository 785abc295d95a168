#!/usr/bin/env bash
# Makes .venv beside this file and installs the pinned requirements into it:
#
#   bash setup.sh              all that training on a CPU needs
#   bash setup.sh tpu|gpu      beside that, what a Cloud TPU VM or a machine with NVIDIA GPUs needs
#   bash setup.sh aot          beside that, the compilers for TPUs and GPUs, for any machine (src.train_compile)
#   bash setup.sh data         beside that, what reads data of the types array_record, tfds and parquet
#   bash setup.sh streams      beside that, Hugging Face's datasets and Grain: data of the type hf, and streams
#   bash setup.sh trackers     beside that, Weights & Biases and MLflow (report_to)
#   bash setup.sh eval         beside that, what runs tasks of lm-evaluation-harness (src.evaluate RUN tasks=...)
#   bash setup.sh dev          beside that, what the tests, the linter and the notebook need
#
# Names combine (bash setup.sh gpu dev) and add up over several calls. A call that finds nothing to do takes a second.
# The Python is the first of PYTHONS below that PATH, pyenv or uv has. PYTHON="3.12 3.13" names other versions, and
# PYTHON=/path/to/python a program. VENV=.venv-3.12 makes the environment in that folder instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Those for which requirements/ pins packages that work. The first is the one that .ci/run tests whole, with the same
# pins as the next two have; for 3.11 there is an older JAX.
PYTHONS="3.13 3.12 3.14 3.11"
venv=${VENV:-.venv}

fail() {
  echo "setup.sh: $1" >&2
  exit 2
}

# version PROGRAM: prints its version, such as 3.13, if it is CPython with its lock, for which packages have wheels. A
# shim of pyenv's that is not active is on PATH and does not run.
version() {
  "$1" - 2>/dev/null <<'PYTHON' || true
import sys, sysconfig
if sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("%d.%d" % sys.version_info[:2])
PYTHON
}

# find_python: prints the program that PYTHON means, or that is there of the versions that are wanted.
find_python() {
  local wanted=${PYTHON:-$PYTHONS} each candidate
  if [[ ! "$wanted" =~ ^[0-9.\ ]+$ ]]; then
    [[ " $PYTHONS " == *" $(version "$wanted") "* ]] || fail "PYTHON=$wanted is no Python of these versions: $PYTHONS"
    echo "$wanted"
    return
  fi
  for each in $wanted; do
    [[ " $PYTHONS " == *" $each "* ]] || fail "PYTHON=$each is none of the versions $PYTHONS"
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
  [[ "$name" =~ ^(tpu|gpu|aot|data|streams|trackers|eval|dev)$ ]] || fail "'$name' is none of tpu, gpu, aot, data, streams, trackers, eval, dev"
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
  [[ " $wanted " == *" $has "* ]] || fail "$venv has Python $has, and PYTHON=$PYTHON asks for another: remove $venv, or name a folder by VENV"
fi

# $venv/installed keeps a copy of each file that was installed. One that is the same is skipped; one that has changed
# since is installed again, named or not: a new JAX does not work with the old one's plugin.
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
  rm -rf "$venv/aot" # src/extras/aot/compilers.py says why they have a folder of their own
  install requirements/aot.txt --no-deps --target="$venv/aot" --requirement=requirements/aot.txt
  cp requirements/aot.txt "$venv/installed/"
fi
echo "setup.sh: $venv is ready; train with $venv/bin/python -m src.train configs/quickstart.yml"
