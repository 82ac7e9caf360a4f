#!/usr/bin/env bash
# Build Transformer Engine without a GPU, in a virtual environment of its own: tools/te_environment.sh [FOLDER]
# Enough for `make te-conformance`: modules can be built on the meta device; kernels cannot run. Takes about 20
# minutes and 8 GB. Reads: PYTHON (default python3), TE_VERSION, TORCH_VERSION, MAX_JOBS.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-te}
torch=${TORCH_VERSION:-2.14.1}  # a CUDA build: its wheels bring the headers
engine=${TE_VERSION:-2.11.0}    # the newest that megatron-core 0.16.1 is paired with

[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
python="$PWD/$folder/bin/python"
case $folder in /*) python="$folder/bin/python" ;; esac
pip=("$python" -m pip install -q --disable-pip-version-check)
# the CUDA wheels of torch leave out the headers that only compilers need
"${pip[@]}" "torch==$torch" pybind11 ninja setuptools wheel packaging 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'
# torch is another build here, so its pin is left out
grep -v '^torch==' constraints.txt > "$folder/constraints.txt"
"${pip[@]}" -c "$folder/constraints.txt" -e '.[dev]'

packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
join() { find "$packages/nvidia" -mindepth 2 -maxdepth 2 -type d -name "$1" | paste -sd:; }
if ! "$python" -c 'import transformer_engine.pytorch' 2>/dev/null; then
  CPATH=$(join include):$(find "$packages/nvidia" -type d -path '*/include/cccl') LIBRARY_PATH=$(join lib) LD_LIBRARY_PATH=$(join lib) \
    NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS=90 MAX_JOBS=${MAX_JOBS:-1} \
    "${pip[@]}" --no-build-isolation "transformer-engine[pytorch]==$engine"
fi
"$python" -c 'import torch, transformer_engine as te; print("torch", torch.__version__, "transformer-engine", te.__version__)'
