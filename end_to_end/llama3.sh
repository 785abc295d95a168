#!/usr/bin/env bash
# Llama 3, 3.1 or 3.3 from a Hugging Face folder: logits beside transformers', loss, text, LoRA, and back (family.sh).
#
#   bash end_to_end/llama3.sh [HF_DIR [OUT_DIR]]     without HF_DIR, or with "": a tiny random model, with 3.1's positions
source "$(dirname "${BASH_SOURCE[0]}")/family.sh"
main_of "${1:-}" "${2:-}" llama3
