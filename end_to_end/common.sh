# What every script here begins with (it is sourced, not run): the repository's root, a Python, what SKIP means.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=${PYTHON:-python3}; fi

# Ends the script as one that cannot run here; all.sh reads the exit code and prints the reason.
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

# agrees FILE LIMIT: the logits that `src.convert check` wrote of differ by less, in the mean over positions: a router's
# near tie may send one token elsewhere.
agrees() {
  awk -v limit="$2" '/^KL divergence/ {found = 1; near = $3 < limit} END {exit !(found && near)}' "$1" && return
  echo "the logits are not those of transformers"
  return 1
}

# loss_fell RUN: the mean of the run's last five losses is below that of its first five.
loss_fell() {
  grep -o '"loss": [^,]*' "$1/metrics.jsonl" | awk '{loss[NR] = $2}
    END {for (i = 1; i <= 5; i++) {first += loss[i]; last += loss[NR + 1 - i]}
      printf "loss: %.3f in the first five steps, %.3f in the last five\n", first / 5, last / 5; exit last >= first}'
}
