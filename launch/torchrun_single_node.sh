#!/usr/bin/env bash
# usage: launch/torchrun_single_node.sh --config FILE [--SECTION.KEY VALUE ...]
#
# Train on this machine. Settings and data are checked first; then torchrun starts the processes, and starts them again
# after a failure. All arguments go to `gnmr-megatron train`, with `--resume auto` unless they name another --resume, so
# that a restart goes on from the last checkpoint.
#
# SIGTERM, SIGUSR1 and SIGINT save a checkpoint after the current step and end with 0.
# Exit codes: 0 done, or saved after a signal; 1 stopped while running; 2 wrong settings or data.
#
# Environment:
#   NPROC_PER_NODE  processes (default: GPUs that nvidia-smi lists, or cores where there is none)
#   MAX_RESTARTS    how often torchrun starts all processes again (default: 3)
#   PYTHON          interpreter (default: python3)

set -euo pipefail
# shellcheck source=launch/supervise.sh
. "$(dirname "${BASH_SOURCE[0]}")/supervise.sh"

case ${1:-} in -h | --help) show_help && exit ;; esac
has_option --resume "$@" || set -- "$@" --resume auto
set -- --checkpoint.stop_seconds 600 "$@" # torchrun does not kill here; settings that follow win
processes=${NPROC_PER_NODE:-$(default_processes)}

"$PYTHON" -m gnmr_megatron launch --check --nproc-per-node "$processes" "$@"
# the address, because a container may not know its own name
run_torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" --max-restarts "${MAX_RESTARTS:-3}" \
  -m gnmr_megatron train "$@"
