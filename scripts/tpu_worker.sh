#!/usr/bin/env bash
# The part of scripts/tpu.sh that runs on a worker of a TPU slice, in ~/mintext, its copy of the repository.
#
#   install            replaces the copy by the content of ~/mintext.tgz, and installs requirements/
#   start ID COMMAND   starts a run and follows it; if it was started before, only follows it
#   follow             prints the last run's output from start to end; exits with its exit code
#   stop TERM|KILL     TERM lets the run save a checkpoint
#   status             prints the state of the last run in a line
#
# A run does not depend on the connection that started it. For each run, .launched/ID/ has: log, its output; pid, of the
# command; leader, the pid of its session leader; code, the exit code, once it has ended.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
id=$(cat .launched/last 2>/dev/null || true)
run=.launched/$id

is_alive() { [[ -n "$id" && ! -e $run/code ]] && kill -0 "$(<"$run/leader")" 2>/dev/null; }

refuse_if_alive() {
  if is_alive; then
    echo "the run $id is alive on this worker: end it by tpu.sh stop NAME, or follow it by tpu.sh run NAME" >&2
    exit 3
  fi
}

install() {
  refuse_if_alive
  if [[ -f .copied ]]; then tr '\n' '\0' <.copied | xargs -0 rm -f; fi # remove files deleted since the last copy
  tar -xzvf ../mintext.tgz >.copied
  if [[ ! -x .venv/bin/python ]]; then # Cloud TPU's images have Python 3.10
    python3 -m pip install --quiet --user uv
    python3 -m uv python install --quiet 3.13
    PYTHON=$(python3 -m uv python find 3.13)
    export PYTHON
  fi
  bash setup.sh tpu
}

start() {
  if [[ ! -d .launched/$1 ]]; then # gcloud repeats a command whose connection broke
    refuse_if_alive
    id=$1 run=.launched/$1
    mkdir -p "$run"
    : >"$run/log"
    # shellcheck disable=SC2016 # the inner shell expands them
    PATH=$PWD/.venv/bin:$PATH setsid bash -c '
      run=$1
      shift
      "$@" >>"$run/log" 2>&1 &
      echo $! >"$run/pid"
      wait $! && code=0 || code=$?
      echo $code >"$run/code"
    ' launched "$PWD/$run" "${@:2}" </dev/null >/dev/null 2>&1 &
    echo $! >"$run/leader"
    disown # or bash reports its end
    echo "$id" >.launched/last
  fi
  follow
}

follow() {
  if [[ -z "$id" ]]; then
    echo "no run was started on this worker" >&2
    exit 3
  fi
  tail -n +1 -s 0.2 -f --pid="$(<"$run/leader")" "$run/log"
  local code
  code=$(cat "$run/code" 2>/dev/null || echo 137) # killed, together with the shell that writes it
  exit $((code == 255 ? 1 : code))                # 255 is ssh's code for a broken connection
}

stop() {
  if ! is_alive; then return; fi
  if [[ $1 == KILL ]]; then kill -KILL -- "-$(<"$run/leader")"; else kill -TERM "$(<"$run/pid")"; fi
}

status() {
  if is_alive; then
    echo "run $id is alive"
  elif [[ -n "$id" ]]; then
    echo "run $id ended with exit code $(cat "$run/code" 2>/dev/null || echo 137)"
  else
    echo "no run was started"
  fi
}

"$@"
