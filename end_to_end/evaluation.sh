#!/usr/bin/env bash
# Trains a small model on Python's library, measures it on tasks of lm-evaluation-harness that read local files, and
# checks that the harness gets the same results for the exported model with its own Hugging Face code: equal accuracies
# and texts, and log-probabilities within 1e-4.
#
#   bash end_to_end/evaluation.sh [FOLDER]     about three minutes on two cores; keeps FOLDER, else a temporary one
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
needs_transformers
"$python" -c "import lm_eval" 2>/dev/null || skip "lm_eval is missing: bash setup.sh eval"
"$python" -c "import accelerate" 2>/dev/null || skip "accelerate, which --model hf needs, is missing: pip install accelerate"
out=${1:-$(mktemp -d)}
mkdir -p "$out/tasks"

"$python" - "$out/tasks" <<'PYTHON'
import json, random, sys
from pathlib import Path

folder, draw = Path(sys.argv[1]), random.Random(0)
words = "red green blue black white gold pink grey".split()
rows = []
for _ in range(24):
    choices = draw.sample(words, 3)
    rows.append({"question": " ".join(choices), "choices": choices, "label": draw.randrange(3)})
texts = [{"text": Path(name).read_text()[:size]} for name, size in (("README.md", 300), ("setup.sh", 1000), ("LICENSE", 50))]
for name, lines in (("rows", rows), ("texts", texts)):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
mean = "aggregation: mean, higher_is_better: true"
tasks = {
    "my_choice": ("rows", f"""output_type: multiple_choice
doc_to_text: "Which of {{{{question}}}}?"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc, {mean}}}, {{metric: acc_norm, {mean}}}]"""),
    "my_texts": ("rows", f"""output_type: generate_until
doc_to_text: "{{{{question}}}}:"
doc_to_target: "{{{{choices[2]}}}}"
generation_kwargs: {{until: ["\\n", "e"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, {mean}}}]"""),
    "my_bytes": ("texts", """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]"""),
}
for name, (file, lines) in tasks.items():
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/{file}.jsonl}}}}\ntest_split: test\nfewshot_split: test"
    (folder / f"{name}.yaml").write_text(f"task: {name}\n{lines}\n{data}\n")
PYTHON

"$python" -m src.train configs/quickstart.yml run_name=run base_output_directory="$out" steps=100 sample_length=0
"$python" -m src.convert to-hf "$out/run" "$out/hf"
"$python" -m src.evaluate "$out/run" tasks=my_choice,my_texts,my_bytes include_path="$out/tasks" trust_tasks=true num_fewshot=2 \
  results_path="$out/tasks.json"

"$python" -m end_to_end.with_harness "$out"
