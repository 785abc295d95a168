# Implements `scripts/tpu.sh run` (which sources it and shares its variables): copy, install, start, follow to the end.
#
# For each worker, a local gcloud process holds the connection, and runs/tpu/NAME/ID/ has a log and an exit code.

run() {
  local id i j job=follow
  id=$(date +%Y%m%d-%H%M%S)-$$ # two launches may start in the same second
  logs=runs/tpu/$name/$id
  if ! $dry_run; then mkdir -p "$logs"; fi
  count_workers
  if [[ ${#command[@]} -gt 0 ]]; then
    copy
    job="start $id $(quoted "${command[@]}")"
  fi
  running=() interrupts=0 killed=false
  if ! $dry_run; then
    echo "tpu.sh: ${#nodes[@]} x $workers workers; their output is in $logs"
    trap interrupted INT TERM
  fi
  for ((i = 0; i < ${#nodes[@]}; i++)); do
    for ((j = 0; j < workers; j++)); do
      if $dry_run; then
        on_one "$i" "$j" "$job"
      else
        set -m # in its own process group, so that Ctrl-C only reaches this script
        record "$i" "$j" "$job" </dev/null &
        set +m
        running+=("slice-$i-worker-$j")
      fi
    done
  done
  if ! $dry_run; then watch; fi
}

# Sets `workers`, the number per slice: all slices of a queued resource are alike.
count_workers() {
  local ask=(gcloud compute tpus tpu-vm describe "${nodes[0]}" "${where[@]}" '--format=value(networkEndpoints.len())')
  if $dry_run; then quoted "${ask[@]}"; else workers=$("${ask[@]}"); fi
}

copy() {
  archive=${TMPDIR:-/tmp}/mintext-$name.tgz
  local pack="{ $tracked_files; } | COPYFILE_DISABLE=1 tar -czf $(quoted "$archive") -T -"
  if $dry_run; then echo "$pack"; else echo "tpu.sh: copying and installing" && eval "$pack"; fi
  on_each_node copy_to || fail "copying or installing failed; the workers' output is in $logs"
}

copy_to() {
  if $dry_run; then
    install_on "$1"
  elif ! install_on "$1" >"$logs/$1-install.log" 2>&1; then
    tail -n 3 "$logs/$1-install.log" >&2
    return 1
  fi
}

install_on() {
  run_or_print gcloud compute tpus tpu-vm scp "$archive" "$1:mintext.tgz" --worker=all "${where[@]}" \
    --strict-host-key-checking=no &&
    run_or_print gcloud compute tpus tpu-vm ssh "$1" --worker=all "${where[@]}" "${quietly[@]}" \
      --command="mkdir -p mintext && tar -xzf mintext.tgz -C mintext scripts/tpu_worker.sh && $on_worker install"
}

# on_one SLICE WORKER ARGUMENTS: runs scripts/tpu_worker.sh with these arguments on one worker.
on_one() {
  run_or_print gcloud compute tpus tpu-vm ssh "${nodes[$1]}" --worker="$2" "${where[@]}" "${quietly[@]}" \
    --command="$on_worker $3"
}

# record SLICE WORKER ARGUMENTS: the same, logging the output; also prints the first worker's output.
record() {
  local log=$logs/slice-$1-worker-$2.log code=0 line
  if [[ $1-$2 == 0-0 ]]; then
    on_one "$@" 2>&1 | tee "$log" | while IFS= read -r line; do
      printf 'slice 0 worker 0 | %s\n' "$line"
    done || code=${PIPESTATUS[0]}
  else
    on_one "$@" >"$log" 2>&1 || code=$?
  fi
  echo "$code" >"${log%.log}.code"
}

# Waits for all workers. If one fails, kills the others, which would wait for it; exits with the failed one's code.
watch() {
  local result=0 still each code
  while [[ ${#running[@]} -gt 0 ]]; do
    still=()
    for each in "${running[@]}"; do
      if [[ ! -s $logs/$each.code ]]; then
        still+=("$each")
        continue
      fi
      code=$(<"$logs/$each.code")
      if [[ $code == 0 ]]; then continue; fi
      if [[ $result == 0 ]]; then result=$code; fi
      case $code in
        143) ;; # stopped by SIGTERM, like all workers, which save a checkpoint together
        255) echo "tpu.sh: $each: the connection broke, but the run continues; follow it with tpu.sh run $name" >&2 ;;
        *)
          if ! $killed; then echo "tpu.sh: $each failed with exit code $code: $logs/$each.log" >&2; fi
          kill_all
          ;;
      esac
    done
    running=(${still[@]+"${still[@]}"})
    sleep 1 &
    wait $! || true # a trap interrupts it
  done
  if [[ $result == 143 ]]; then echo "tpu.sh: stopped; the same command resumes the run, if it has a run_name"; fi
  exit "$result"
}

interrupted() {
  interrupts=$((interrupts + 1))
  if [[ $interrupts -gt 1 ]]; then
    kill_all
  else
    echo "tpu.sh: stopping; the run saves a checkpoint first, Ctrl-C again kills it" >&2
    signal TERM
  fi
}

kill_all() {
  if ! $killed; then
    killed=true
    signal KILL
  fi
}

# signal NAME: signals the run on all workers without waiting; their end is noticed elsewhere.
signal() {
  set -m
  on_each_node tell "stop $1" >>"$logs/stop.log" 2>&1 </dev/null &
  set +m
}
