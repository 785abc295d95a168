#!/usr/bin/env bash
# Runs on GKE, on TPU slices or GPU nodes, as a JobSet (docs/launch.md).
#
#   scripts/gke.sh image IMAGE tpu|gpu          builds an image of this working tree with Docker, and pushes it
#   scripts/gke.sh run NAME --type v5e-256 [--slices N] --image IMAGE -- \
#       python -m src.train configs/base.yml run_name=NAME key=value
#                                               --type is a TPU slice or a GPU host (a3), N their number
#   scripts/gke.sh logs NAME                    prints and follows the output of process 0
#   scripts/gke.sh status NAME                  the JobSet and its pods
#   scripts/gke.sh delete NAME                  ends the run, which saves a checkpoint, and deletes the JobSet
#
# Cluster and namespace are from kubectl's configuration. --dry-run prints the commands without running them.

# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

if [[ ${1:-} == --dry-run ]]; then dry_run=true && shift; fi
[[ $# -gt 0 ]] || set -- --help
action=$1 type='' slices=1 image='' words=() command=()
case $action in
  image | run | logs | status | delete) shift ;;
  -h | --help) show_help && exit ;;
  *) fail "'$action' is not one of image, run, logs, status, delete" ;;
esac
while [[ $# -gt 0 ]]; do
  if [[ $1 == --*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
  case $1 in
    --type | --slices | --image)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --dry-run) dry_run=true ;;
    -h | --help) show_help && exit ;;
    --) command=("${@:2}") && break ;;
    -*) fail "unknown option $1: scripts/gke.sh --help" ;;
    *) words+=("$1") ;;
  esac
  shift
done
[[ ${#words[@]} -gt 0 ]] || fail "$action what? scripts/gke.sh --help"
name=${words[0]}
[[ ${#words[@]} -eq $([[ $action == image ]] && echo 2 || echo 1) ]] ||
  fail "scripts/gke.sh $action: '${words[*]}' is the wrong number of names; a command to run comes after --"
program=$([[ $action == image ]] && echo docker || echo kubectl)
$dry_run || type -P "$program" >/dev/null || fail "$program is not installed"
selector=jobset.sigs.k8s.io/jobset-name=$name

build_image() {
  local devices=${words[1]} context="{ $tracked_files; } | COPYFILE_DISABLE=1 tar -czf - -T -"
  [[ $devices == tpu || $devices == gpu ]] || fail "'$devices' is neither tpu nor gpu"
  local build=(docker build --platform=linux/amd64 --file=scripts/Dockerfile --build-arg="DEVICES=$devices"
    --tag="$name" -)
  if $dry_run; then echo "$context | $(quoted "${build[@]}")"; else eval "$context" | "${build[@]}"; fi
  run_or_print docker push "$name"
}

run() {
  [[ -n $type ]] || fail "--type is missing: a TPU slice or a GPU host, such as v5e-256 or a3"
  [[ -n $image ]] || fail "--image is missing: scripts/gke.sh image IMAGE tpu|gpu builds one"
  [[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices $slices: expected a number, 1 or more"
  [[ ${#command[@]} -gt 0 ]] || fail "no command: -- python -m src.train configs/base.yml run_name=$name"
  check_resumes "${command[@]}"
  local python=.venv/bin/python manifest
  [[ -x $python ]] || python=python3
  local fill=("$python" -m scripts.jobset "$name" "$type" "$slices" "$image" "${command[@]}")
  manifest=$("${fill[@]}") # also in a dry run, to report mistakes
  if $dry_run; then
    echo "$(quoted "${fill[@]}") | kubectl create --filename=-"
  else
    kubectl create --filename=- <<<"$manifest"
    echo "gke.sh: follow it with scripts/gke.sh logs $name"
  fi
}

case $action in
  image) build_image ;;
  run) run ;;
  logs)
    run_or_print kubectl logs --follow --tail=-1 \
      --selector="$selector,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    ;;
  status)
    run_or_print kubectl get jobset "$name"
    run_or_print kubectl get pods --selector="$selector"
    ;;
  delete) run_or_print kubectl delete jobset "$name" ;;
esac
