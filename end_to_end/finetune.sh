#!/usr/bin/env bash
# Trains a tokenizer and a small model on the standard library's source, then finetunes it on other text (this
# repository's documentation), and checks that its first loss there is below that of a randomly initialized model.
#
#   bash end_to_end/finetune.sh [FOLDER]     about three minutes on two cores; keeps FOLDER, else a temporary one
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out=${1:-$(mktemp -d)}
keys=(base_output_directory="$out" tokenizer_type=sentencepiece tokenizer_path="$out/tokens.model" vocab_size=1000
  max_target_length=128 eval_interval=-1 sample_length=0)

"$python" -m src.train_tokenizer configs/quickstart.yml "${keys[@]}"
"$python" -m src.train configs/quickstart.yml "${keys[@]}" run_name=pretrained steps=200
"$python" -m src.train configs/quickstart.yml "${keys[@]}" run_name=finetuned steps=40 \
  dataset_path="docs/*.md" learning_rate=1e-3 load_parameters_path="$out/pretrained"
"$python" -m src.train configs/quickstart.yml "${keys[@]}" run_name=from_nothing steps=1 dataset_path="docs/*.md"

first_loss() { head -n 1 "$out/$1/metrics.jsonl" | grep -o '"loss": [^,]*' | grep -o '[0-9.]*$'; }
echo "first loss on the documentation: finetuned $(first_loss finetuned), from nothing $(first_loss from_nothing)"
awk "BEGIN {exit !($(first_loss finetuned) < $(first_loss from_nothing) - 1)}"
