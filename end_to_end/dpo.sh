#!/usr/bin/env bash
# Trains a small model on chats with either of two answers, then on pairs that prefer one of them (DPO). Checks that a
# killed and resumed run has the losses of an uninterrupted one, and prefers that answer to prompts it has not seen.
#
#   bash end_to_end/dpo.sh [FOLDER]     about four minutes on two cores; keeps FOLDER, else a temporary one
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out=${1:-$(mktemp -d)}
mkdir -p "$out"

"$python" - "$out" <<'PYTHON'
import itertools, json, random, sys

words = "red green blue black white gold pink grey cyan teal navy lime plum rust sand jade".split()
draw, chats, pairs, test = random.Random(0), [], [], []
colours = list(itertools.permutations(words, 3))
draw.shuffle(colours)
for number, (first, middle, last) in enumerate(colours):
    prompt = f"{first} {middle} {last}:"
    chats.append({"prompt": prompt, "completion": f" {draw.choice((first, last))}"})
    (pairs if number < 1500 else test).append({"prompt": prompt, "chosen": f" {last}", "rejected": f" {first}"})
for name, lines in (("chats", chats), ("pairs", pairs), ("test", test[:300])):
    with open(f"{sys.argv[1]}/{name}.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
PYTHON

"$python" -m src.train configs/quickstart.yml run_name=chats base_output_directory="$out" use_sft=true \
  dataset_path="$out/chats.jsonl" base_emb_dim=64 base_mlp_dim=128 base_num_decoder_layers=2 max_target_length=64 \
  steps=400 eval_interval=-1 sample_length=0

dpo() {
  "$python" -m src.train_dpo configs/dpo.yml model_name="$out/chats" load_parameters_path="$out/chats" \
    dataset_path="$out/pairs.jsonl" eval_dataset_path="$out/test.jsonl" base_output_directory="$out" run_name="$1" \
    steps=200 eval_interval=50 checkpoint_period=50 learning_rate=3e-4 per_device_batch_size=8 max_target_length=64 \
    dtype=float32 log_period=20
}
dpo whole
dpo killed > "$out/killed.log" 2>&1 &
until grep -q '^step  *80/200' "$out/killed.log"; do sleep 0.2; done
kill -KILL "$(pgrep -P $!)" && ! wait $!
dpo killed | grep '^resumed from step'

losses() { grep -o '"step": [0-9]*, "loss": [^,]*' "$out/$1/metrics.jsonl"; }
[[ $(losses whole | wc -l) == 200 ]]
cmp <(losses whole) <(losses killed)
accuracy=$(grep -o '"eval_accuracy": [^,]*' "$out/whole/metrics.jsonl" | tail -n 1 | grep -o '[0-9.]*$')
echo "accuracy on $(wc -l < "$out/test.jsonl") pairs of other prompts: $accuracy"
awk "BEGIN {exit !($accuracy > 0.95)}"

for run in chats whole; do
  "$python" -m src.decode "$out/$run" prompt="red teal gold:" sample_length=8 decode_sampling_strategy=greedy
done
"$python" -m src.evaluate configs/base.yml model_name="$out/whole" load_parameters_path="$out/whole" dtype=float32 \
  use_sft=true dataset_path="$out/chats.jsonl" eval_dataset_path="$out/chats.jsonl" max_target_length=64 per_device_batch_size=8
"$python" -m src.convert to-hf "$out/whole" "$out/hf"
