#!/usr/bin/env bash
# Llama 2 from a Hugging Face folder: logits beside transformers', loss, text, LoRA, and back (family.sh).
#
#   bash end_to_end/llama2.sh [HF_DIR [OUT_DIR]]     without HF_DIR, or with "": a tiny random model
source "$(dirname "${BASH_SOURCE[0]}")/family.sh"
main_of "${1:-}" "${2:-}" llama
