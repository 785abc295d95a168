#!/usr/bin/env bash
# Kills a run (kill -9) at random moments, restarts it with the same command, and compares every loss and every bit of its
# weights and optimizer state with an uninterrupted run.
#
#   bash end_to_end/kill_resume.sh [FOLDER]     about five minutes on two cores; keeps FOLDER, else a temporary one
#
# DEVICES=8 runs on eight virtual CPU devices; KILLS=20 kills it twenty times.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out=${1:-$(mktemp -d)}
devices=${DEVICES:-1}
kills=${KILLS:-10}
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=$devices

train() {
  exec "$python" -m src.train configs/quickstart.yml base_output_directory="$out" steps=200 checkpoint_period=20 \
    per_device_batch_size="$(awk "BEGIN {print 8 / $devices}")" max_target_length=64 eval_interval=-1 sample_length=0 "$@"
}

last_step() { grep -o '"step": [0-9]*' "$out/killed/metrics.jsonl" 2>/dev/null | tail -n 1 | grep -o '[0-9]*$' || echo 0; }

mkdir -p "$out"
echo "the uninterrupted run"
(train run_name=whole) >"$out/whole.log"

RANDOM=1
for ((kill = 1; kill <= kills; kill++)); do
  # Choose a step that leaves some for the remaining kills.
  before=$(last_step)
  target=$((before + RANDOM % (2 * (200 - before) / (kills - kill + 2)) + 1))
  (train run_name=killed) >"$out/killed_$kill.log" 2>&1 &
  # Wait until the run has resumed, because it first cuts the file back to the checkpoint's step.
  until grep -qs '^resumed\|^step' "$out/killed_$kill.log" && (($(last_step) >= target)); do
    sleep 0.05
    kill -0 $! 2>/dev/null || { cat "$out/killed_$kill.log"; exit 1; }
  done
  kill -KILL $!
  wait $! 2>/dev/null || true
  echo "killed at step $(last_step)"
done
(train run_name=killed) >"$out/last.log"

losses() { grep -o '^{"step": [0-9]*, "loss": [^,]*' "$out/$1/metrics.jsonl"; }
diff <(losses whole) <(losses killed)
# The checkpoint's own file contains a digest of every array.
cmp "$out"/{whole,killed}/checkpoints/200/meta/metadata
echo "the same $(losses killed | wc -l) losses, the same bits: $out"
