#!/usr/bin/env bash
# All checks and measurements that need a GPU, in under five minutes on one of the Hopper generation.
# Needs torch 2.11 or newer and this package (`pip install -e .`); no network. Transformer Engine is checked where it
# is installed. DEVICE=cpu ROUNDS=2 runs the same script small on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
rounds=${ROUNDS:-20}
model=${MODEL:-configs/runs/llama2_350m.yaml}
tokens=${TOKENS:-16384}
export PYTHONPATH=.
[ "$device" = cuda ] || export CUDA_VISIBLE_DEVICES=

step() { printf '\n== %s\n' "$1"; shift; "$@"; }
step "numbers against the CPU, Transformer Engine" "$python" tests/gpu/checks.py --device "$device"
step "kernels against a copy" "$python" tools/benchmark_precision.py kernels --tokens "$tokens" --rounds "$rounds"
step "GEMMs against BF16" "$python" tools/benchmark_precision.py gemm --tokens "$tokens" --rounds "$rounds"
[ -d data/stdlib ] || step "data" "$python" -m gnmr_megatron prepare-data stdlib: --output data/stdlib --vocab-size 2048
step "memory" "$python" tools/benchmark_precision.py memory --config "$model" --rounds 1
step "low, recovered and BF16 steps; switch" "$python" tools/benchmark_precision.py step --config "$model" --rounds "$rounds"
step "control on and off" "$python" tools/benchmark_control.py --single --rounds "$rounds" --config "$model" \
  --data configs/data/stdlib.yaml --train.global_batch_size 8 --train.micro_batch_size 4 --train.eval_samples 8 \
  --parallel '{}' --optimizer.warmup_steps 1
