#!/usr/bin/env bash
# Every check that needs an NVIDIA GPU, on a machine with one H100 or H200: kernels against plain ones, MFU in bfloat16,
# fp8 against it, a step that was saved without a GPU, profiles that steer the compiler, decoding. Writes one JSON.
#
#   bash scripts/on_gpu.sh [OUT.json]                       half an hour; after bash setup.sh gpu and bash setup.sh aot
#   bash scripts/on_gpu.sh OUT.json --platform cpu          the same path in tiny sizes without a GPU, in minutes
#   bash scripts/on_gpu.sh OUT.json --only decoding kernels
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=${PYTHON:-python3}; fi
exec "$python" scripts/on_gpu.py "$@"
