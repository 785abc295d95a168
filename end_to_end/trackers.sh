#!/usr/bin/env bash
# Tracks a run with Weights & Biases and MLflow together, offline: stops it with SIGTERM, resumes, kills, and resumes it to
# its end. Then compares the contents of W&B's file and MLflow's store with metrics.jsonl.
#
#   bash end_to_end/trackers.sh [FOLDER]     two minutes on two cores; keeps FOLDER, else a temporary one
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"$python" -c "import mlflow; from wandb import Run" 2>/dev/null || skip "wandb and mlflow are missing: bash setup.sh trackers"
out=$(realpath "${1:-$(mktemp -d)}")
mkdir -p "$out"
export WANDB_MODE=offline WANDB_PROJECT=whole-jobs MLFLOW_EXPERIMENT_NAME=whole-jobs
export MLFLOW_TRACKING_URI="file://$out/mlflow" MLFLOW_ALLOW_FILE_STORE=true

run() {
  exec "$python" -m src.train configs/quickstart.yml run_name=run base_output_directory="$out" steps="$1" \
    base_emb_dim=64 base_mlp_dim=128 base_num_decoder_layers=2 max_target_length=64 dtype=float32 eval_interval=50 \
    eval_steps=1 checkpoint_period=100 learning_rate_schedule_steps=1000 log_internals=100 sample_length=16 \
    log_period=10 "report_to=[wandb,mlflow]"
}
run 1000000 >"$out/first.log" 2>&1 &
until grep -q '^step  *230/' "$out/first.log"; do sleep 0.1; done
kill -TERM $!
code=0; wait $! || code=$?
[[ $code == 143 ]]
"$python" - "$out" <<'PYTHON'
import mlflow, sys
(run,) = mlflow.search_runs(experiment_names=["whole-jobs"], output_format="list")
assert run.info.status == "KILLED" and run.info.run_name == "run", run.info
PYTHON
run 1000000 >"$out/second.log" 2>&1 &
until grep -q '^step  *480/' "$out/second.log"; do sleep 0.1; done
sleep 1
kill -KILL $! && ! wait $!
(run 700) | tee "$out/third.log" | grep -E '^(resumed|wandb|mlflow)'
grep -q '^resumed from step [1-9]00' "$out/third.log"

"$python" - "$out" <<'PYTHON'
import glob, json, math, statistics, struct, sys
import mlflow
from wandb.proto.wandb_internal_pb2 import Record

out = sys.argv[1]
expected = {}  # step -> scalars in metrics.jsonl
for line in map(json.loads, open(f"{out}/run/metrics.jsonl")):
    step = line.pop("step")
    for key, value in line.items():
        name = f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"
        of_list = {"min": min, "mean": statistics.fmean, "max": max} if isinstance(value, list) else {}
        named = {f"{name}/{kind}": reduce(value) for kind, reduce in of_list.items()} or {name: value}
        expected.setdefault(step, {}).update(named)
assert list(expected) == list(range(1, 701))


def records(path):
    """Reads W&B's file: a 7-byte header, then records in parts within blocks of 32 KiB, like LevelDB's log."""
    data, at, whole = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(whole)
            whole = b""


files = sorted(glob.glob(f"{out}/run/wandb/offline-run-*/*.wandb"))
assert len(files) == 3, files
steps, ids, codes, samples, configs = {}, set(), [], [], []
for file in files:
    for record in records(file):
        match record.WhichOneof("record_type"):
            case "run":
                ids.add((record.run.run_id, record.run.project))
                configs.append({each.key: json.loads(each.value_json) for each in record.run.config.update})
            case "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                step = items.pop("_step")
                assert step not in steps, f"W&B has step {step} twice"
                steps[step] = {key: value for key, value in items.items() if not key.startswith("_")}
            case "exit":
                codes.append(record.exit.exit_code)
            case "summary":
                samples += [json.loads(item.value_json) for item in record.summary.update if item.key == "sample"]
((id, project),) = ids
assert project == "whole-jobs" and codes == [143, 0], (ids, codes)
assert samples == [open(f"{out}/run/sample.txt").read()]
assert configs[0]["steps"] == 1_000_000 and configs[-1]["steps"] == 700, configs[-1]
client = mlflow.MlflowClient()
(run,) = mlflow.search_runs(experiment_names=["whole-jobs"], output_format="list")
assert run.info.status == "FINISHED" and run.data.params["steps"] == "1000000" and run.data.tags["steps"] == "700"
assert run.data.tags["sample"] == samples[0]
kept = {}
for key in run.data.metrics:
    for metric in client.get_metric_history(run.info.run_id, key):
        assert key not in kept.setdefault(metric.step, {}), f"MLflow has {key} of step {metric.step} twice"
        kept[metric.step][key] = metric.value

# Steps that a resumed run repeated have the same values, except for times and rates.
timed = ("second", "tflops", "mfu")
for name, found in (("W&B", steps), ("MLflow", kept)):
    missing = expected.keys() - found.keys()
    assert len(missing) < 300 and all(step > 230 for step in missing), (name, sorted(missing))
    again = 0
    for step, values in found.items():
        assert values.keys() == expected[step].keys(), (name, step, values.keys() ^ expected[step].keys())
        again += values != expected[step]
        for key, value in values.items():
            assert value == expected[step][key] or any(word in key for word in timed), (name, step, key)
    print(f"{name}: {len(found)} steps, each once, as in metrics.jsonl; {again} were computed twice; missing: {len(missing)}")
PYTHON
