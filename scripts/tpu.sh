#!/usr/bin/env bash
# Manages Cloud TPU VMs: all workers of one or several slices at once (docs/launch.md).
#
#   scripts/tpu.sh create NAME --type v5litepod-256 [--slices N] [--spot|--reserved|--on-demand]
#                  [--version RUNTIME] [--no-wait]      requests the slices, a queued resource, and waits for them
#   scripts/tpu.sh run NAME -- python -m src.train configs/base.yml run_name=JOB key=value
#                                                       copies this working tree to all workers, installs, runs
#   scripts/tpu.sh run NAME                             follows the current run
#   scripts/tpu.sh stop NAME                            makes the run save a checkpoint and end; --force kills it
#   scripts/tpu.sh status NAME                          prints the slices' state, and whether a run is alive
#   scripts/tpu.sh ssh NAME [--slice I] [--worker J]    opens a shell on a worker
#   scripts/tpu.sh delete NAME [--yes] [--force]        releases the slices; --force also if in use
#
# All commands take --zone and --project (default: gcloud's configuration) and --dry-run, which prints the commands
# without running them. A dry run does not query NAME, but takes --slices and --workers (per slice), 1 by default.
#
# Ctrl-C in `run` means `stop`, a second one kills. The exit code of `run` is 0 if every worker's was.

# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

if [[ ${1:-} == --dry-run ]]; then dry_run=true && shift; fi
[[ $# -gt 0 ]] || set -- --help
action=$1 name='' type='' slices=1 workers=1 version='' tier='' zone='' project='' slice=0 worker=0
waits=true yes=false force=false command=()
case $action in
  create | run | stop | status | ssh | delete) shift ;;
  -h | --help) show_help && exit ;;
  *) fail "'$action' is not one of create, run, stop, status, ssh, delete" ;;
esac
while [[ $# -gt 0 ]]; do
  if [[ $1 == --*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
  case $1 in
    --type | --slices | --workers | --version | --zone | --project | --slice | --worker)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --spot | --reserved) tier=$1 ;;
    --on-demand) tier='' ;;
    --no-wait) waits=false ;;
    --yes) yes=true ;;
    --force) force=true ;;
    --dry-run) dry_run=true ;;
    -h | --help) show_help && exit ;;
    --) command=("${@:2}") && break ;;
    -*) fail "unknown option $1: scripts/tpu.sh --help" ;;
    *)
      [[ -z $name ]] || fail "'$1' is one name too many: a command to run comes after --"
      name=$1
      ;;
  esac
  shift
done
[[ -n $name ]] || fail "which queued resource? scripts/tpu.sh $action NAME"
for number in slices workers; do
  [[ ${!number} =~ ^[1-9][0-9]*$ ]] || fail "--$number ${!number}: expected a number, 1 or more"
done
for number in slice worker; do
  [[ ${!number} =~ ^[0-9]+$ ]] || fail "--$number ${!number}: expected a number, 0 or more"
done

# setting KEY: prints the value in gcloud's configuration, or nothing.
setting() {
  local value
  value=$(gcloud config get-value "$1" 2>/dev/null) || true
  [[ $value == "(unset)" ]] || echo "$value"
}
$dry_run || type -P gcloud >/dev/null || fail "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
[[ -n $zone ]] || zone=$(setting compute/zone)
[[ -n $project ]] || project=$(setting project)
[[ -n $zone$project ]] || fail "which zone and project? Give --zone and --project, or once:\
 gcloud config set compute/zone ZONE; gcloud config set project PROJECT"
[[ -n $zone ]] || fail "which zone? Give --zone, or once: gcloud config set compute/zone ZONE"
[[ -n $project ]] || fail "which project? Give --project, or once: gcloud config set project PROJECT"
where=(--zone="$zone" --project="$project")
# Without these, idle connections are cut after ten minutes, and ssh would ask about unknown hosts.
quietly=(--strict-host-key-checking=no --ssh-flag=-oServerAliveInterval=30)
on_worker='bash mintext/scripts/tpu_worker.sh'

# Sets `state`, and `nodes` to the names of the slices.
look() {
  local ask=(gcloud compute tpus queued-resources describe "$name" "${where[@]}"
    '--format=value(state.state,tpu.nodeSpec[].nodeId)') answer
  if $dry_run; then
    quoted "${ask[@]}"
    state=ACTIVE nodes=("$name")
    if [[ $slices -gt 1 ]]; then for ((i = 0; i < slices; i++)); do nodes[i]=$name-$i; done; fi
    return
  fi
  answer=$("${ask[@]}") || fail "$name was not found in $zone of $project (create it with scripts/tpu.sh create)"
  state=${answer%%$'\t'*}
  IFS=';' read -r -a nodes <<<"${answer#*$'\t'}"
}

require_active() {
  look
  [[ $state == ACTIVE ]] || fail "$name is $state, not ACTIVE: scripts/tpu.sh status $name"
}

# on_each_node COMMAND: runs COMMAND NODE for all slices in parallel; fails if any of them fails.
on_each_node() {
  local pids=() node pid failed=0
  trap 'for pid in "${pids[@]}"; do kill -TERM -- "-$pid"; done; exit 130' INT
  for node in "${nodes[@]}"; do
    if $dry_run; then
      "$@" "$node"
      continue
    fi
    set -m # in its own process group, which can be killed as a whole
    "$@" "$node" </dev/null &
    set +m
    pids+=($!)
  done
  for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid" || failed=1; done
  trap - INT
  return $failed
}

# tell ARGUMENTS NODE: runs scripts/tpu_worker.sh with these arguments on all workers of a slice.
tell() {
  run_or_print gcloud compute tpus tpu-vm ssh "$2" --worker=all "${where[@]}" "${quietly[@]}" --command="$on_worker $1"
}

create() {
  local runtime shape=(--node-id="$name")
  case $type in
    v4-[1-9]*) runtime=tpu-ubuntu2204-base ;; # docs.cloud.google.com/tpu/docs/runtimes
    v5litepod-[1-9]*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-[1-9]*) runtime=v2-alpha-tpuv5 ;;
    v6e-[1-9]*) runtime=v2-alpha-tpuv6e ;;
    v5e-*) fail "--type $type: Cloud TPU's name for it is v5litepod-${type#v5e-}" ;;
    tpu7x*) fail "--type $type: TPU7x is not available as TPU VMs, only on GKE: scripts/gke.sh" ;;
    '') fail "--type is missing: expected v4-N, v5litepod-N, v5p-N or v6e-N, such as v5litepod-256" ;;
    *) fail "--type '$type' is unknown: expected v4-N, v5litepod-N, v5p-N or v6e-N, such as v5litepod-256" ;;
  esac
  if [[ $slices -gt 1 ]]; then shape=(--node-count="$slices" --node-prefix="$name"); fi
  run_or_print gcloud compute tpus queued-resources create "$name" "${where[@]}" --accelerator-type="$type" \
    --runtime-version="${version:-$runtime}" "${shape[@]}" ${tier:+"$tier"}
  if ! $waits; then return; fi
  local before=''
  while look && ! $dry_run; do
    [[ $state == "$before" ]] || echo "$name: $state"
    case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        echo "tpu.sh: it will not become ACTIVE; see gcloud compute tpus queued-resources describe $name" >&2
        exit 1
        ;;
    esac
    before=$state
    sleep 30
  done
}

status() {
  look
  if ! $dry_run; then echo "$name: $state"; fi
  if [[ $state != ACTIVE ]]; then return; fi
  local node
  for node in "${nodes[@]}"; do
    run_or_print gcloud compute tpus tpu-vm describe "$node" "${where[@]}" \
      '--format=value(name.basename(),state,health)'
  done
  if $dry_run; then on_each_node tell status; else on_each_node tell status 2>/dev/null | sort | uniq -c; fi
}

# shellcheck source=scripts/tpu_run.sh
source scripts/tpu_run.sh
case $action in
  create) create ;;
  run)
    check_resumes ${command[@]+"${command[@]}"}
    require_active && run
    ;;
  stop)
    require_active
    on_each_node tell "stop $($force && echo KILL || echo TERM)"
    ;;
  status) status ;;
  ssh)
    require_active
    [[ $slice -lt ${#nodes[@]} ]] || fail "--slice $slice: $name has ${#nodes[@]}, counted from 0"
    run_or_print gcloud compute tpus tpu-vm ssh "${nodes[slice]}" --worker="$worker" "${where[@]}"
    ;;
  delete)
    forced=()
    if $force; then forced=(--force); fi
    if ! $yes && ! $dry_run; then
      read -r -p "Delete $name in $zone of $project? [y/N] " answer
      [[ $answer == [yY]* ]] || exit 1
    fi
    run_or_print gcloud compute tpus queued-resources delete "$name" "${where[@]}" ${forced[@]+"${forced[@]}"} --quiet
    ;;
esac
