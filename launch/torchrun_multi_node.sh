#!/usr/bin/env bash
# usage: launch/torchrun_multi_node.sh --config FILE [--SECTION.KEY VALUE ...]
#
# Train on many machines: start this on each of them, with the same arguments. First all nodes compare versions, settings
# and data, and all of them stop where something differs. Then torchrun starts the processes, and starts them again after
# a failure. All arguments go to `gnmr-megatron train`, with `--resume auto` unless they name another --resume.
#
# SIGTERM, SIGUSR1 and SIGINT on any node save a checkpoint after the current step and end all nodes with 0.
# Exit codes: 0 done, or saved after a signal; 1 stopped while running; 2 wrong settings or data, or nodes that differ.
#
# Environment; what is not set comes from Slurm, or from PET_* and MASTER_* as Kubeflow sets them:
#   NNODES          number of nodes (default: SLURM_JOB_NUM_NODES, PET_NNODES)
#   HEAD_ADDR       host of one node, at which all meet (default: first of SLURM_JOB_NODELIST, PET_MASTER_ADDR,
#                   MASTER_ADDR, or the first line of HOSTFILE)
#   HOSTFILE        file with one host a line, as of MPI
#   NODE_RANK       0 on HEAD_ADDR (default: SLURM_NODEID, PET_NODE_RANK; may be left out where HEAD_ADDR is a name or
#                   address that the machine knows as its own)
#   NPROC_PER_NODE  processes a node (default: PET_NPROC_PER_NODE, or GPUs that nvidia-smi lists, or cores)
#   RDZV_PORT       port on HEAD_ADDR; the one above it is used, too (default: 29500)
#   RDZV_ID         name of the job, the same on all nodes (default: SLURM_JOB_ID, or gnmr)
#   NIC             network interface of gloo and NCCL, such as eth0 (default: they choose)
#   LOG_DIR         folder of logs; each node has a folder in it, each process a file (default: runs/logs)
#   MAX_RESTARTS    how often torchrun starts all processes again (default: 3)
#   PYTHON          interpreter (default: python3)

set -euo pipefail
# shellcheck source=launch/supervise.sh
. "$(dirname "${BASH_SOURCE[0]}")/supervise.sh"

case ${1:-} in -h | --help) show_help && exit ;; esac

refuse() {
  echo "torchrun_multi_node.sh: $1" >&2
  exit 2
}

find_head() {
  if [ -n "${SLURM_JOB_NODELIST:-}" ] && command -v scontrol >/dev/null; then
    scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p
  elif [ -n "${PET_MASTER_ADDR:-${MASTER_ADDR:-}}" ]; then
    echo "${PET_MASTER_ADDR:-$MASTER_ADDR}"
  elif [ -n "${HOSTFILE:-}" ]; then
    awk '/^[^#]/ { print $1; exit }' "$HOSTFILE"
  fi
}

nodes=${NNODES:-${SLURM_JOB_NUM_NODES:-${PET_NNODES:-}}}
[ -n "$nodes" ] || refuse "NNODES: is not set; give the number of nodes"
head=${HEAD_ADDR:-$(find_head)}
[ -n "$head" ] || refuse "HEAD_ADDR: is not set, and neither Slurm nor MASTER_ADDR nor HOSTFILE tell it; name one of the nodes"
node_rank=${NODE_RANK:-${SLURM_NODEID:-${PET_NODE_RANK:-}}}
processes=${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-auto}}
[ "$processes" != auto ] || processes=$(default_processes)
port=${RDZV_PORT:-29500}
id=${RDZV_ID:-${SLURM_JOB_ID:-gnmr}}
logs=${LOG_DIR:-runs/logs}/$(hostname)${node_rank:+-$node_rank}
if [ -n "${NIC:-}" ]; then
  export GLOO_SOCKET_IFNAME=$NIC NCCL_SOCKET_IFNAME=$NIC
fi
host=() # who holds the store that all meet at; torchrun guesses by names, which containers often do not know
if [ -n "$node_rank" ]; then
  host=(--rdzv-conf "is_host=$([ "$node_rank" -eq 0 ] && echo 1 || echo 0)")
fi
has_option --resume "$@" || set -- "$@" --resume auto
set -- --checkpoint.stop_seconds 600 "$@" # torchrun does not kill here; settings that follow win

"$PYTHON" -m gnmr_megatron launch --check --nodes "$nodes" --nproc-per-node "$processes" \
  --rdzv-endpoint "$head:$((port + 1))" --rdzv-id "$id" "${host[@]}" "$@"
mkdir -p "$logs"
run_torchrun --nnodes "$nodes" --nproc-per-node "$processes" --max-restarts "${MAX_RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$id" "${host[@]}" \
  --log-dir "$logs" --redirects 3 --tee 0:3 -m gnmr_megatron train "$@"
