#!/usr/bin/env bash
# Every check that needs an NVIDIA GPU, on a machine with one H100 or H200, the most telling first: MFU in bfloat16,
# kernels against plain ones, fp8, decoding, a step that was saved without a GPU, memory and time beside what the
# compiler says ahead of time, other models, profiles that steer the compiler. Writes one JSON, whole after each check.
#
#   bash scripts/on_gpu.sh [OUT.json]                       half an hour; after bash setup.sh gpu and bash setup.sh aot
#   bash scripts/on_gpu.sh OUT.json --minutes 8             begins no check that would not end in time
#   bash scripts/on_gpu.sh OUT.json --only decoding kernels
#   bash scripts/on_gpu.sh OUT.json --platform cpu          the same path in tiny sizes without a GPU, in minutes
#
# It also runs in an environment that is there already: PYTHON=python3 chooses that before .venv. JAX with its CUDA
# plugin, Flax, Optax and Orbax have to be installed in it. Smaller packages may be wheels in .whl/, which are put on the
# path: pip download --no-deps -d .whl ml_collections tensorboardX
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [[ -z "${PYTHON:-}" && -x .venv/bin/python ]]; then python=.venv/bin/python; fi
for wheel in .whl/*-none-any.whl; do
  if [[ -f "$wheel" ]]; then export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/$wheel"; fi
done
exec "$python" scripts/on_gpu.py "$@"
