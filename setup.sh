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
# PYTHON=/path/to/python3.12 chooses the Python; otherwise it is python3.12, python3.11 or python3, whichever is found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() {
  echo "setup.sh: $1" >&2
  exit 2
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is no Python of version 3.11 or newer"
    echo "$PYTHON"
    return
  fi
  for candidate in python3.12 python3.11 python3; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is needed, and python3 is $(python3 --version 2>&1 || true). If it is elsewhere: PYTHON=/path/to/python3 bash setup.sh"
}

for name in "$@"; do
  [[ "$name" =~ ^(tpu|gpu|aot|data|streams|trackers|eval|dev)$ ]] || fail "'$name' is none of tpu, gpu, aot, data, streams, trackers, eval, dev"
done

if [[ ! -x .venv/bin/python ]]; then
  python="$(find_python)"
  if ! "$python" -m venv .venv; then
    rm -rf .venv
    fail "'$python -m venv .venv' failed (on Debian and Ubuntu: apt install python3-venv)"
  fi
fi

# .venv/installed keeps a copy of each file that was installed. One that is the same is skipped; one that has changed
# since is installed again, named or not: a new JAX does not work with the old one's plugin.
mkdir -p .venv/installed
asked=" base $* "
is_due() {
  local file="requirements/$1.txt" copy=".venv/installed/$1.txt"
  [[ "$asked" == *" $1 "* || -f "$copy" ]] && ! cmp -s "$file" "$copy"
}
install() {
  echo "setup.sh: installing $1 for $(.venv/bin/python --version); a minute or more"
  .venv/bin/python -m pip install -qq --disable-pip-version-check "${@:2}"
}

to_install=()
for name in base tpu gpu data streams trackers eval dev; do
  if is_due "$name"; then
    to_install+=("requirements/$name.txt")
  fi
done
if [[ ${#to_install[@]} -gt 0 ]]; then
  install "${to_install[*]}" "${to_install[@]/#/--requirement=}"
  cp "${to_install[@]}" .venv/installed/
fi
if is_due aot; then
  rm -rf .venv/aot # src/aot/compilers.py says why they have a folder of their own
  install requirements/aot.txt --no-deps --target=.venv/aot --requirement=requirements/aot.txt
  cp requirements/aot.txt .venv/installed/
fi
echo "setup.sh: .venv is ready; train with .venv/bin/python -m src.train configs/quickstart.yml"
