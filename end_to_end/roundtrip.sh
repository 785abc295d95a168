#!/usr/bin/env bash
# Creates a tiny random Llama and its tokenizer with transformers, then converts, checks, evaluates, finetunes on chats,
# and decodes it. Exports it back to transformers, where the converted weights must give bit-identical logits, and the
# finetuned weights the run's logits.
#
#   bash end_to_end/roundtrip.sh [OUT_DIR]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
needs_transformers
out=${1:-$(mktemp -d)}
export JAX_PLATFORMS=cpu
keys=(model_name="$out/converted/model.yml" dtype=float32 base_output_directory="$out" max_target_length=64
  per_device_batch_size=8)

echo "---- from Hugging Face"
"$python" -m end_to_end.tiny_model make llama "$out/tiny"
"$python" -m src.convert from-hf "$out/tiny" "$out/converted"
"$python" -m src.convert check "$out/tiny" "$out/converted" | tee "$out/check.txt"
agrees "$out/check.txt" 1e-5

echo "---- and back, untrained"
"$python" -m src.convert to-hf "$out/converted" "$out/back"
"$python" -m end_to_end.tiny_model same "$out/tiny" "$out/back"

echo "---- evaluate, finetune, evaluate"
for a in {1..9}; do
  for b in {1..9}; do
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"$a + $b =\"}, {\"role\": \"assistant\", \"content\": \"$((a + b))\"}]}"
  done
done >"$out/chats.jsonl"
sft=(use_sft=true dataset_path="$out/chats.jsonl" eval_dataset_path="$out/chats.jsonl")
loss_of() {
  "$python" -m src.evaluate configs/base.yml "${keys[@]}" "${sft[@]}" load_parameters_path="$1" | awk '/^eval_loss/ {print $2}'
}
before=$(loss_of "$out/converted/checkpoint")
"$python" -m src.train configs/base.yml "${keys[@]}" "${sft[@]}" load_parameters_path="$out/converted/checkpoint" \
  run_name=finetuned steps=100 learning_rate=1e-2 checkpoint_period=100 log_period=10
after=$(loss_of "$out/finetuned")
echo "loss of the answers: $before before, $after after"
awk "BEGIN {exit !($after < $before / 2)}"

echo "---- decode"
"$python" -m src.decode configs/base.yml "${keys[@]}" load_parameters_path="$out/finetuned" use_chat_template=true \
  prompt="2 + 2 =" sample_length=8 decode_sampling_strategy=greedy

echo "---- and back, finetuned"
"$python" -m src.convert to-hf "$out/finetuned" "$out/hf"
"$python" -m src.convert check "$out/hf" "$out/finetuned" | tee "$out/check.txt"
agrees "$out/check.txt" 1e-5
