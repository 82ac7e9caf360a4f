#!/usr/bin/env bash
# usage: docker run IMAGE --config FILE [--SECTION.KEY VALUE ...]   train, through torchrun
#        docker run IMAGE VERB ...                                  a verb of gnmr-megatron
#        docker run IMAGE COMMAND ...                               anything else
#
# Training starts launch/torchrun_multi_node.sh where NNODES, PET_NNODES or SLURM_JOB_NUM_NODES is above 1, and
# launch/torchrun_single_node.sh elsewhere; their --help lists the environment variables.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  -*)
    nodes=${NNODES:-${SLURM_JOB_NUM_NODES:-${PET_NNODES:-1}}}
    if [ "$nodes" -gt 1 ]; then script=torchrun_multi_node.sh; else script=torchrun_single_node.sh; fi
    exec "launch/$script" "$@"
    ;;
  launch | prepare-data | summary | train | units) exec gnmr-megatron "$@" ;;
  *) exec "$@" ;;
esac
