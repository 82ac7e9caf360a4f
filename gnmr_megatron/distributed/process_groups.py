"""Start and end of the process groups, and what every rank tells every other at start-up."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from gnmr_megatron.distributed.cpu_adapter import enable_cpu
from gnmr_megatron.distributed.engine_compat import check_engine
from gnmr_megatron.distributed.layout import ParallelLayout

T = TypeVar("T")


def start_process_groups(layout: ParallelLayout, *, seed: int, timeout: timedelta) -> torch.device:
    """Join the processes that torchrun started, and build Megatron's groups.

    Without torchrun's environment this process is a world of its own.

    Returns:
        The device of this rank.

    Raises:
        EngineError: another version of megatron-core is installed.
    """
    check_engine()
    is_cpu = enable_cpu()
    if is_cpu:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "gloo" if is_cpu else "nccl"
    if dist.is_initialized():
        pass  # a world that the caller has joined already
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return device


def stop_process_groups() -> None:
    """Leave the groups in good order; not to be called after a failure, when others may no longer answer."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gather_from_all(value: T) -> list[T]:
    """The value of every rank, in the order of ranks; for start-up, not for the training step."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all_gather_object filled every place
