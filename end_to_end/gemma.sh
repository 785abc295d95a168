#!/usr/bin/env bash
# Gemma 1 to 4 from a Hugging Face folder: logits beside transformers', loss, text, LoRA, and back (family.sh).
#
#   bash end_to_end/gemma.sh [HF_DIR [OUT_DIR]]     without HF_DIR, or with "": tiny random models of each
source "$(dirname "${BASH_SOURCE[0]}")/family.sh"
main_of "${1:-}" "${2:-}" gemma gemma2 gemma3 gemma4
