# shellcheck shell=bash
# Sourced by the torchrun scripts: what both of them do.
#
# A wish to stop (SIGTERM, SIGUSR1, SIGINT) goes to the training processes and not to torchrun's agent. The agent
# would pass SIGTERM on, kill after 30 seconds whoever still saves a checkpoint, and exit with 1; SIGUSR1 would end it
# at once. So the agent ignores these signals (Slurm sends them to every process of a step). The processes finish
# their step, save and exit with 0, and then so does the agent. SIGHUP still ends it.

export PET_SIGNALS_TO_HANDLE=SIGHUP # torchrun's --signals-to-handle, which old versions do not have
PYTHON=${PYTHON:-python3}

# The header of the script.
show_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# Processes of this machine: a GPU each, or a core each where there is no GPU.
default_processes() {
  local gpus
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || gpus=0
  if [ "$gpus" -gt 0 ]; then echo "$gpus"; else nproc; fi
}

# Whether an option is among the arguments: has_option --resume "$@"
has_option() {
  local option=$1 argument
  shift
  for argument; do
    case $argument in "$option" | "$option"=*) return 0 ;; esac
  done
  return 1
}

children_of() {
  grep -ls "^PPid:[[:space:]]*$1\$" /proc/[0-9]*/status | cut -d/ -f3 || true
}

# Run torchrun with these arguments; returns its exit code.
run_torchrun() {
  local agent status=0 workers=() had_workers=
  asked_to_stop=
  trap 'asked_to_stop=yes' TERM USR1 INT
  (
    trap '' TERM USR1 INT # ignored by the processes, too, until they can handle it
    exec "$PYTHON" -m torch.distributed.run "$@"
  ) &
  agent=$!
  wait "$agent" || status=$?
  if [ -n "$asked_to_stop" ] && kill -0 "$agent" 2>/dev/null; then
    while kill -0 "$agent" 2>/dev/null; do
      mapfile -t workers < <(children_of "$agent")
      if [ "${#workers[@]}" -gt 0 ]; then
        had_workers=yes
        kill -TERM "${workers[@]}" 2>/dev/null || true # again and again: it may still be too early for them
      elif [ -z "$had_workers" ]; then
        kill -HUP "$agent" 2>/dev/null || true # nothing has started yet
      fi
      sleep 1 || true # a signal to the whole job ends it
    done
    status=0
    wait "$agent" || status=$?
  fi
  return "$status"
}
