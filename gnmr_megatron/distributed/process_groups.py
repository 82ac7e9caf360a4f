"""Start and end of the process groups, and what every rank tells every other at start-up."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import (  # type: ignore[attr-defined]  # HashStore is public, but not in __all__
    HashStore,
    PrefixStore,
)
from torch.distributed.rendezvous import rendezvous

from gnmr_megatron.distributed.cpu_adapter import enable_cpu
from gnmr_megatron.distributed.engine_compat import check_engine
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.watchdog import STORE_SECONDS, KeyValueStore

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
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        fresh = PrefixStore(_agree_on_attempt(store, rank, world_size), store)
        dist.init_process_group(
            backend, timeout=timeout, store=fresh, rank=rank, world_size=world_size
        )
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed + _seed_offset())
    return device


def _seed_offset() -> int:
    """Pipeline stages and replicas draw dropout of their own; tensor-parallel ranks the same, or by Megatron's tracker.

    The tracker adds 2,718 and the tensor-parallel rank to the seed, so steps are wider than that.
    """
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return 10_000 * (replica * stages + parallel_state.get_pipeline_model_parallel_rank())


def _agree_on_attempt(store: Any, rank: int, world_size: int) -> str:
    """A name that the ranks of this start share with no earlier one.

    torchrun keeps one store over its restarts, and counts restarts for each node by itself: addresses of an earlier
    attempt would be found as if they were of this one, and ranks hang (pytorch/pytorch#135712). So each rank asks
    under a name of its own, which overwrites what an earlier process left, and rank 0 answers until all have heard.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"attempt/asks/{rank}", own)
        attempt: str = store.get(f"attempt/answer/{own}").decode()
        store.set(f"attempt/{attempt}/heard/{rank}", "")
        return attempt
    answered: dict[int, bytes] = {}
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            asks = store.get(f"attempt/asks/{other}")
            if answered.get(other) != asks:
                store.set(f"attempt/answer/{asks.decode()}", own)
                answered[other] = asks
            if store.check([f"attempt/{own}/heard/{other}"]):
                missing.discard(other)
        time.sleep(0.01)
    return own


def launch_id() -> str:
    """A name of this launch of the ranks, which stays over torchrun's restarts; for rank 0."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):  # a restart has another prefix in the same store
        store = store.underlying_store
    name: bytes = store.compare_set("launch_id", "", uuid.uuid4().hex)
    return name.decode()


def own_store() -> KeyValueStore:
    """A connection of its own to the store through which the ranks met, for use by another thread."""
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    return store


def stop_process_groups() -> None:
    """Leave the groups in good order; not to be called after a failure, when others may no longer answer."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gather_from_all(value: T) -> list[T]:
    """The value of every rank, in the order of ranks; for start-up, not for the training step."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all_gather_object filled every place
