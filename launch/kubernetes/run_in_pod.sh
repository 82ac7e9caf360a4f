#!/usr/bin/env bash
# usage: launch/kubernetes/run_in_pod.sh --config FILE [--SECTION.KEY VALUE ...]
#
# What each pod runs: launch/torchrun_multi_node.sh, ending with 0 only where the run is completed. A pod that was
# evicted saves and ends well, too, and Kubernetes would take the job for done; it has to start the pod again.

set -euo pipefail
stop() { kill -TERM "$training" 2>/dev/null || true; }
"$(dirname "${BASH_SOURCE[0]}")/../torchrun_multi_node.sh" "$@" &
training=$!
trap stop TERM INT
status=0
wait "$training" || status=$?
if kill -0 "$training" 2>/dev/null; then # a signal cut the waiting short
  status=0
  wait "$training" || status=$?
fi
[ "$status" -eq 0 ] || exit "$status"
state=$("${PYTHON:-python3}" -m gnmr_megatron launch --status "$@")
echo "run $state"
[ "$state" = completed ]
