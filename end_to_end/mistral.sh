#!/usr/bin/env bash
# Mistral or Mixtral from a Hugging Face folder: logits beside transformers', loss, text, LoRA, and back (family.sh).
#
#   bash end_to_end/mistral.sh [HF_DIR [OUT_DIR]]     without HF_DIR, or with "": tiny random models of both
source "$(dirname "${BASH_SOURCE[0]}")/family.sh"
main_of "${1:-}" "${2:-}" mistral mixtral
