#!/usr/bin/env bash
# Runs a command on the GPUs of a SLURM cluster, one process a GPU, and again until it is done (docs/launch.md).
#
#   scripts/slurm.sh [--nodes N] [--gpus-per-node G] [--dry-run] [OPTION=VALUE ...] -- \
#       python -m src.train configs/base.yml run_name=NAME key=value
#
# 1 node with 8 GPUs if not said. OPTION=VALUE (--partition=..., --time=..., --account=...) goes to sbatch as it is.
# Before: `bash setup.sh gpu` in this folder, which all nodes see. --dry-run prints the command and runs nothing.
#
# Five minutes before the job's time is up, the run is told to save a checkpoint and end, and the job goes into the
# queue again; so it does where SLURM preempts it. It goes on by its run_name. `scancel JOB` ends it for good.

#SBATCH --job-name=mintext
#SBATCH --exclusive
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/slurm-%j.log
set -euo pipefail

# What SLURM runs, of a copy of this file, on the job's first node, in the folder that the job was submitted from.
in_job() {
  local code trapped=true
  trap 'trapped=true' TERM # it is for the run; this shell stays until that has ended
  trap 'trapped=true; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 # to the run's processes, not to this shell
  # JAX gives each process the GPU of its number on the node, so each must see all of them.
  PATH=$PWD/.venv/bin:$PATH srun --kill-on-bad-exit=1 --cpu-bind=none --gpu-bind=none "$@" &
  while $trapped; do # a trap ends `wait` early
    trapped=false code=0
    wait $! || code=$?
  done
  # After 143 there is more to do. A job that was cancelled, or that SLURM has put into the queue itself, is not RUNNING.
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
    --*) fail "'$1' needs its value after a =: $1=VALUE" ;;
    *) fail "'$1' is no option of the form --NAME=VALUE; the command to run comes after --" ;;
  esac
  shift
done
for number in nodes gpus; do
  [[ ${!number} =~ ^[1-9][0-9]*$ ]] || fail "--$number ${!number}: expected a number, 1 or more"
done
[[ $# -gt 1 ]] || fail "what is to be run? scripts/slurm.sh ... -- python -m src.train configs/base.yml run_name=NAME"
check_resumes "${@:2}"
if ! $dry_run; then
  type -P sbatch >/dev/null || fail "sbatch is not here: run this on a login node of the cluster"
  mkdir -p runs
fi
run_or_print sbatch --nodes="$nodes" --gpus-per-node="$gpus" --ntasks-per-node="$gpus" \
  ${options[@]+"${options[@]}"} scripts/slurm.sh in-job "${@:2}"
