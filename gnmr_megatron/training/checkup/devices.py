"""GPUs and cores: what is there, whether it is free, and whether there is enough for the processes of this node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from gnmr_megatron.training.checkup.findings import DEVICES, VERSIONS, Finding
from gnmr_megatron.training.checkup.imports import import_problem

DRIVER = Path("/proc/driver/nvidia/version")
FIRST_WITH_FP8 = (8, 9)
_FREE_SHARE = 0.9


def check_devices(*, processes: int | None) -> Iterator[Finding]:
    """Cores and GPUs of this node, and the versions of what drives GPUs.

    Args:
        processes: of this node; None where no run is looked at.
    """
    cores = len(os.sched_getaffinity(0))
    yield DEVICES.ok("cpu", f"{cores} cores for this process")
    if import_problem("torch") is not None:
        yield DEVICES.warning(
            "gpu", "not looked for, because torch cannot be imported", "see the versions"
        )
        return
    import torch

    if torch.cuda.is_available():
        yield from _cuda_versions()
        yield from _gpus()
        count, what = torch.cuda.device_count(), "GPU"
    else:
        cuda = torch.version.cuda
        built = f"torch was built with CUDA {cuda}" if cuda else "torch was built without CUDA"
        for check in ("nvidia driver", "cuda", "cudnn", "nccl", "apex"):
            yield VERSIONS.not_applicable(check, f"{built}, and sees no GPU")
        yield from why_no_gpu(has_driver=DRIVER.exists(), torch_cuda=torch.version.cuda)
        count, what = cores, "core"
    if processes is not None:
        yield enough_devices(processes, count, what)


def why_no_gpu(*, has_driver: bool, torch_cuda: str | None) -> Iterator[Finding]:
    """What it means that torch sees no GPU.

    Args:
        has_driver: whether NVIDIA's driver is loaded.
        torch_cuda: version of CUDA that torch was built with.
    """
    if not has_driver:
        yield DEVICES.not_applicable("gpu", "there is none; runs take the CPU, over gloo")
    elif torch_cuda is None:
        yield DEVICES.problem(
            "gpu",
            "NVIDIA's driver is loaded, but torch was built without CUDA",
            "install a torch with CUDA: https://pytorch.org/get-started/locally",
        )
    else:
        yield DEVICES.problem(
            "gpu",
            f"NVIDIA's driver is loaded, but torch, built with CUDA {torch_cuda}, sees no GPU",
            "look at CUDA_VISIBLE_DEVICES, at nvidia-smi, and whether the driver is new enough for this CUDA",
        )


def enough_devices(processes: int, count: int, what: str) -> Finding:
    """Whether each process of this node has a device of its own."""
    detail = f"{processes} on {count} {what}{'' if count == 1 else 's'}"
    if processes <= count:
        return DEVICES.ok("processes of this node", detail)
    if what == "GPU":
        return DEVICES.problem(
            "processes of this node",
            detail,
            "start fewer processes a node (--nproc-per-node), or change parallel.*_size",
        )
    return DEVICES.warning(
        "processes of this node",
        f"{detail}: they wait for each other",
        "start fewer, or be patient",
    )


def gpu_finding(
    index: int, name: str, *, capability: tuple[int, int], total: int, free: int
) -> Finding:
    """What is said of one GPU; memory in bytes."""
    fp8 = "FP8 GEMMs" if capability >= FIRST_WITH_FP8 else "no FP8 GEMMs"
    detail = (
        f"{name}, compute capability {capability[0]}.{capability[1]} ({fp8}), {free / 1e9:.1f} of {total / 1e9:.1f} GB "
        "free"
    )
    check = f"gpu {index}"
    if free < _FREE_SHARE * total:
        return DEVICES.warning(check, detail, "another process uses it; see nvidia-smi")
    return DEVICES.ok(check, detail)


def driver_version(text: str) -> str | None:
    """The driver's version out of its file in /proc."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def gpu_names() -> list[str]:
    """Names of the GPUs that torch sees; empty also where torch is broken."""
    if import_problem("torch") is not None:
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _cuda_versions() -> Iterator[Finding]:
    import torch

    driver = driver_version(DRIVER.read_text()) if DRIVER.exists() else None
    yield VERSIONS.ok("nvidia driver", driver or "not told by /proc")
    yield VERSIONS.ok("cuda", f"{torch.version.cuda} (torch was built with it)")
    cudnn = torch.backends.cudnn.version()
    yield VERSIONS.ok("cudnn", str(cudnn or "none"))
    yield VERSIONS.ok("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    problem = import_problem("fused_weight_gradient_mlp_cuda")
    if problem is None:
        yield VERSIONS.ok("apex", "adds weight gradients within their GEMM")
    else:
        yield VERSIONS.warning(
            "apex",
            f"its fused_weight_gradient_mlp_cuda cannot be imported ({problem}); gradients are added by a kernel more",
            "build NVIDIA apex from source, or take an NGC image; the one on PyPI is another project",
        )


def _gpus() -> Iterator[Finding]:
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield gpu_finding(
            index,
            torch.cuda.get_device_name(index),
            capability=torch.cuda.get_device_capability(index),
            total=total,
            free=free,
        )
