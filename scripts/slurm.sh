#!/usr/bin/env bash
# Runs a command on the GPUs of a SLURM cluster, one process per GPU, resubmitting it until it is done (docs/launch.md).
#
#   scripts/slurm.sh [--nodes N] [--gpus-per-node G] [--dry-run] [OPTION=VALUE ...] -- \
#       python -m src.train configs/base.yml run_name=NAME key=value
#
# The default is 1 node with 8 GPUs. OPTION=VALUE (--partition=..., --time=..., --account=...) is passed to sbatch.
# First run `bash setup.sh gpu` in this folder, which all nodes must share. --dry-run only prints the command.
#
# Five minutes before the job's time limit, or when SLURM preempts it, the run saves a checkpoint and ends, and the job
# is queued again. It resumes by its run_name. `scancel JOB` ends it for good.

#SBATCH --job-name=mintext
#SBATCH --exclusive
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/slurm-%j.log
set -euo pipefail

# SLURM runs this from a copy of this file, on the job's first node, in the folder from which it was submitted.
in_job() {
  local code trapped=true
  trap 'trapped=true' TERM # meant for the run; this shell waits for it to end
  trap 'trapped=true; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 # signals the run's processes, not this shell
  # JAX assigns GPUs by process number on the node, so each process must see all of them.
  PATH=$PWD/.venv/bin:$PATH srun --kill-on-bad-exit=1 --cpu-bind=none --gpu-bind=none "$@" &
  while $trapped; do # a trap interrupts `wait`
    trapped=false code=0
    wait $! || code=$?
  done
  # Exit code 143 means unfinished. A job that was cancelled, or that SLURM itself has requeued, is not RUNNING.
  if [[ $code == 143 && $(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
if [[ "${1:-}" == in-job ]]; then in_job "${@:2}"; fi

# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

nodes=1 gpus=8 options=()
[[ $# -gt 0 ]] || set -- --help
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    --nodes | --gpus-per-node)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      set -- "$1=$2" "${@:3}"
      continue
      ;;
    --nodes=*) nodes=${1#*=} ;;
    --gpus-per-node=*) gpus=${1#*=} ;;
    --dry-run) dry_run=true ;;
    -h | --help) show_help && exit ;;
    --*=*) options+=("$1") ;;
    --*) fail "'$1' needs a value: $1=VALUE" ;;
    *) fail "'$1' is not an option of the form --NAME=VALUE; the command to run comes after --" ;;
  esac
  shift
done
for number in nodes gpus; do
  [[ ${!number} =~ ^[1-9][0-9]*$ ]] || fail "--$number ${!number}: expected a number, 1 or more"
done
[[ $# -gt 1 ]] || fail "no command: scripts/slurm.sh ... -- python -m src.train configs/base.yml run_name=NAME"
check_resumes "${@:2}"
if ! $dry_run; then
  type -P sbatch >/dev/null || fail "sbatch is not installed: run this on a login node of the cluster"
  mkdir -p runs
fi
run_or_print sbatch --nodes="$nodes" --gpus-per-node="$gpus" --ntasks-per-node="$gpus" \
  ${options[@]+"${options[@]}"} scripts/slurm.sh in-job "${@:2}"
