# Tests all steps of finetuning a family's models; the scripts of the families source it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# main_of HF_DIR OUT_DIR TINY...: tests the model in HF_DIR or, without it, tiny models (tiny_model.py) of the named
# families. KEYS="ici_tensor_parallelism=8 max_target_length=256" adds keys to every command.
main_of() {
  local given=$1 out=${2:-$(mktemp -d)} keys
  read -ra keys <<<"${KEYS:-}"
  needs_transformers
  if [[ -n "$given" ]]; then
    # Merging adapters into bfloat16 weights rounds, so the limit is higher.
    take_through "$given" "$out" 1e-2 weight_dtype=bfloat16 learning_rate=3e-4 "${keys[@]}"
    return
  fi
  export JAX_PLATFORMS=cpu
  for family in "${@:3}"; do
    "$python" -m end_to_end.tiny_model make "$family" "$out/$family/tiny"
    take_through "$out/$family/tiny" "$out/$family" 1e-5 dtype=float32 learning_rate=1e-2 "${keys[@]}"
  done
}

# take_through HF_DIR OUT_DIR LIMIT key=value...: compares the model's logits with transformers', computes a loss,
# generates text, trains adapters, exports the result, and compares its logits again. Reads HF_DIR without converting it.
take_through() {
  local model=$1 out=$2 limit=$3
  local keys=(model_name="$model" load_parameters_path="$model" base_output_directory="$out" max_target_length=64
    per_device_batch_size=4 "${@:4}")
  mkdir -p "$out"
  for a in {1..9}; do
    for b in {1..9}; do echo "{\"prompt\": \"$a + $b =\", \"completion\": \" $((a + b))\"}"; done
  done >"$out/sums.jsonl"

  echo "---- $model: logits beside transformers'"
  "$python" -m src.convert check "$model" "$model" | tee "$out/check.txt"
  agrees "$out/check.txt" 1e-5

  echo "---- $model: loss and text"
  "$python" -m src.evaluate configs/base.yml "${keys[@]}" eval_dataset_path=README.md eval_steps=2
  "$python" -m src.decode configs/base.yml "${keys[@]}" prompt="2 + 2 =" sample_length=16 \
    decode_sampling_strategy=greedy | tee "$out/text.txt"
  grep -q "2 + 2 =" "$out/text.txt"

  echo "---- $model: adapters"
  "$python" -m src.train configs/base.yml "${keys[@]}" run_name=lora lora_rank=8 use_sft=true \
    dataset_path="$out/sums.jsonl" packing=false steps=20 checkpoint_period=20
  loss_fell "$out/lora"

  echo "---- $model: back"
  "$python" -m src.convert to-hf "$out/lora" "$out/hf"
  "$python" -m src.convert check "$out/hf" "$out/lora" | tee "$out/check.txt"
  agrees "$out/check.txt" "$limit"
}
