"""Memory, disk, shared memory and limits of this node, against what the run needs of them."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from gnmr_megatron.training.checkup.disk_need import checkpoint_bytes, disk_need
from gnmr_megatron.training.checkup.findings import RESOURCES, Finding
from gnmr_megatron.training.checkup.imports import import_problem
from gnmr_megatron.training.checkup.memory_need import memory_need
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.launch_plan import LaunchPlan

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not written to
INFINIBAND = Path("/sys/class/infiniband")
CGROUPS = (  # limit and use of a container's memory, in either version of cgroups
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_LEAST_SHARED_MEMORY = 1 << 30
_LEAST_FILES = 4096
_TIGHT_DISK = 0.9  # of what is free
_TIGHT_MEMORY = 0.75  # peaks of two runs on CPUs were 1.16 and 1.31 times what is counted
_UNLIMITED = 1 << 60


def check_machine() -> Iterator[Finding]:
    """What every run needs of a node."""
    yield RESOURCES.ok("memory", f"{_size(available_memory())} of {_size(total_memory())} free")
    yield shared_memory(SHARED_MEMORY)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        has_infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
    )


def check_needs(plan: LaunchPlan, *, vocab_size: int) -> Iterator[Finding]:
    """Whether this node has the memory and the disk that a valid run needs."""
    yield from _check_memory(plan, vocab_size=vocab_size)
    yield check_disk(plan.config, vocab_size=vocab_size, world_size=plan.world_size)


def check_disk(config: RunConfig, *, vocab_size: int, world_size: int) -> Finding:
    """Whether the run folder fits on its disk; quotas are not seen."""
    need = disk_need(config, vocab_size=vocab_size, world_size=world_size)
    folder = existing_parent(Path(config.runs_dir))
    free = shutil.disk_usage(folder).free
    check = "disk for the run folder"
    detail = (
        f"checkpoints {need.checkpoints} x {_size(need.checkpoint)} at a time, events and risk matrix "
        f"{_size(need.records)}: {_size(need.total)} of {_size(free)} free in {folder}"
    )
    advice = "free space, take another runs_dir, or lower checkpoint.keep_last"
    if config.checkpoint.keep_last is None:
        advice = (
            "set checkpoint.keep_last, which now keeps all; or free space, or take another runs_dir"
        )
    return fits(check, need.total, free, detail, advice, tight=_TIGHT_DISK)


def fits(check: str, need: int, free: int, detail: str, advice: str, *, tight: float) -> Finding:
    """Whether bytes that are needed are free; a warning where they are more than a share of what is free."""
    if need > free:
        return RESOURCES.problem(check, detail, advice)
    if need > tight * free:
        return RESOURCES.warning(check, f"{detail}, which is tight", advice)
    return RESOURCES.ok(check, detail)


def shared_memory(folder: Path) -> Finding:
    """Shared memory, through which NCCL and readers of data pass what they have."""
    if not folder.is_dir():
        return RESOURCES.warning(str(folder), "is not there", "mount a tmpfs on it")
    size = shutil.disk_usage(folder).total
    if size < _LEAST_SHARED_MEMORY:
        return RESOURCES.warning(
            str(folder),
            f"has {_size(size)}; NCCL and data.num_workers need more than Docker's default of 64 MB",
            "start the container with --shm-size=8g or --ipc=host",
        )
    return RESOURCES.ok(str(folder), _size(size))


def open_files(soft: int, hard: int) -> Finding:
    """How many files and sockets a process may have open."""
    check = "open files"
    if soft == resource.RLIM_INFINITY:
        return RESOURCES.ok(check, "unlimited")
    if soft >= _LEAST_FILES:
        return RESOURCES.ok(check, f"{soft:,} a process")
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    return RESOURCES.warning(
        check, f"{soft:,} a process; large worlds need {_LEAST_FILES:,}", f"ulimit -n {most}"
    )


def locked_memory(soft: int, *, has_infiniband: bool) -> Finding:
    """How much memory a process may lock, which RDMA does."""
    check = "locked memory"
    limit = "unlimited" if soft == resource.RLIM_INFINITY else _size(soft)
    if not has_infiniband:
        return RESOURCES.not_applicable(check, f"{limit}; only RDMA needs it")
    if soft == resource.RLIM_INFINITY:
        return RESOURCES.ok(check, limit)
    return RESOURCES.warning(
        check,
        f"{limit}, and InfiniBand is there",
        "ulimit -l unlimited (docker: --ulimit memlock=-1)",
    )


def existing_parent(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path


def available_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes may still take: what the machine has, or what the container has left."""
    return min(psutil.virtual_memory().available, *_of_cgroups(cgroups, left=True))


def total_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of the machine, or of the container's limit."""
    return min(psutil.virtual_memory().total, *_of_cgroups(cgroups, left=False))


def _of_cgroups(root: Path, *, left: bool) -> Iterator[int]:
    yield _UNLIMITED
    for limit_file, use_file in CGROUPS:
        try:
            limit = int((root / limit_file).read_text())
            used = int((root / use_file).read_text())
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
        yield limit - used if left else limit


def _check_memory(plan: LaunchPlan, *, vocab_size: int) -> Iterator[Finding]:
    check = "memory for the run"
    if import_problem("torch") is not None or import_problem("megatron.core") is not None:
        yield RESOURCES.not_applicable(
            check, "not worked out, because a run cannot start; see the versions"
        )
        return
    import torch

    on_gpu = torch.cuda.is_available()
    need = memory_need(plan, vocab_size=vocab_size, on_gpu=on_gpu)
    parts = (
        f"weights {_size(need.weights)}, gradients {_size(need.gradients)}, optimizer {_size(need.optimizer)}, "
        f"activations about {_size(need.activations)}"
    )
    advice = "spread the model over more ranks (parallel.*), or lower train.micro_batch_size"
    # this process has loaded what a training process loads
    program = psutil.Process().memory_info().rss
    if on_gpu:
        free = min(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
        detail = f"the fullest rank: {parts}; {_size(need.total)} of {_size(free)} free on a GPU"
        gpu = "memory of a GPU for the run"
        yield fits(gpu, need.total, free, detail, advice, tight=_TIGHT_MEMORY)
        world = plan.world_size
        saved = checkpoint_bytes(plan.config, vocab_size=vocab_size, world_size=world) // world
        each, what = program + saved, f"program {_size(program)}, checkpoint {_size(saved)}"
    else:
        each, what = program + need.total, f"{parts}, program {_size(program)}"
    total, free = plan.nproc_per_node * each, available_memory()
    detail = f"{plan.nproc_per_node} x ({what}): {_size(total)} of {_size(free)} free"
    yield fits(check, total, free, detail, advice, tight=_TIGHT_MEMORY)


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"
