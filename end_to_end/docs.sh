#!/usr/bin/env bash
# Runs every command of README.md and docs/ that needs no accelerator, exactly as written (documented.py).
#
#   bash end_to_end/docs.sh [PAGE ...]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
needs_transformers
needs_compilers
"$python" -m end_to_end.documented "$@"
