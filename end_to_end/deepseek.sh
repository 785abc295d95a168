#!/usr/bin/env bash
# DeepSeek V2 or V3 from a Hugging Face folder: logits beside transformers', loss, text, LoRA, and back (family.sh).
#
#   bash end_to_end/deepseek.sh [HF_DIR [OUT_DIR]]     without HF_DIR, or with "": tiny random models of both
KEYS="lora_parameters=[attention.query,attention.kv_up] ${KEYS:-}" # latent attention has no attention.value
source "$(dirname "${BASH_SOURCE[0]}")/family.sh"
main_of "${1:-}" "${2:-}" deepseek_v2 deepseek_v3
