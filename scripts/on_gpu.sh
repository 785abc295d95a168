#!/usr/bin/env bash
# Runs every check that needs an NVIDIA GPU (one H100 or H200), the most informative first: MFU in bfloat16, kernels
# against plain ones, fp8, decoding, a step saved without a GPU, measured memory and time against predictions, other
# models, profile-guided compilation. Writes one JSON, complete after each check.
#
#   bash scripts/on_gpu.sh [OUT.json]                       half an hour; after bash setup.sh gpu and bash setup.sh aot
#   bash scripts/on_gpu.sh OUT.json --minutes 8             skips checks that would not finish in time
#   bash scripts/on_gpu.sh OUT.json --only decoding kernels
#   bash scripts/on_gpu.sh OUT.json --platform cpu          the same checks in tiny sizes without a GPU, in minutes
#
# It also runs in an existing environment: PYTHON=python3 takes precedence over .venv. This needs JAX with its CUDA
# plugin, Flax, Optax and Orbax. Smaller packages may be wheels in .whl/, which are added to the path:
# pip download --no-deps -d .whl ml_collections tensorboardX
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [[ -z "${PYTHON:-}" && -x .venv/bin/python ]]; then python=.venv/bin/python; fi
for wheel in .whl/*-none-any.whl; do
  if [[ -f "$wheel" ]]; then export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/$wheel"; fi
done
exec "$python" scripts/on_gpu.py "$@"
