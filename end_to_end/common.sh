# Every script here sources this file: it changes to the repository's root, and defines `python`, `skip` and checks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=${PYTHON:-python3}; fi

# Ends a script that cannot run here; all.sh reads the exit code and prints the reason.
skip() {
  echo "SKIP: $1"
  exit 77
}

needs_transformers() {
  "$python" -c "import torch, transformers" 2>/dev/null || skip "torch and transformers are missing: bash setup.sh dev"
}

needs_compilers() {
  "$python" - <<'PYTHON' 2>/dev/null || skip "the compilers for TPU and GPU are missing: bash setup.sh aot"
import src.extras.aot.compilers
import jax_cuda12_plugin, libtpu
PYTHON
}

# agrees FILE LIMIT: checks that the KL divergence that `src.convert check` reports is below the limit in the mean over
# positions, because a near tie in a router may send a single token to another expert.
agrees() {
  awk -v limit="$2" '/^KL divergence/ {found = 1; near = $3 < limit} END {exit !(found && near)}' "$1" && return
  echo "the logits differ from transformers'"
  return 1
}

# loss_fell RUN: checks that the mean of the run's last five losses is below the mean of its first five.
loss_fell() {
  grep -o '"loss": [^,]*' "$1/metrics.jsonl" | awk '{loss[NR] = $2}
    END {for (i = 1; i <= 5; i++) {first += loss[i]; last += loss[NR + 1 - i]}
      printf "loss: %.3f in the first five steps, %.3f in the last five\n", first / 5, last / 5; exit last >= first}'
}
