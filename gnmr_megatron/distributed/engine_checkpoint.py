"""megatron-core's dist_checkpointing in parts: plan a save, write it in a child process, complete it; load it safely.

The engine's own asynchronous save starts a manager process on its first call (seconds), tells of a failed write on one
rank only, and adds an all-reduce to each step while it waits. Here planning and formats are the engine's; who writes,
and when all know that it is written, is decided by the caller.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import queue
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint._traverse import set_element

from gnmr_megatron.distributed.checkpoint_index import (
    BACKEND,
    VERSION,
    check_pickles,
    write_engine_files,
)

_EXTRA_STATE = "_extra_state"

# the engine starts a manager process for a queue that is not used here
filesystem_async._results_queue = object()


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Plans who writes what; leaves writing and completing to the caller."""

    writer: FileSystemWriterAsync
    metadata: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class PlannedSave:
    """A save that all ranks have planned.

    Args:
        content: sharded state dict; what is not sharded is left out.
        folder: an empty folder.
        validate: check that every part of every tensor is written once; costs a gather over all ranks.
    """

    def __init__(self, content: dict[str, Any], folder: Path, *, validate: bool) -> None:
        self._folder = folder
        sharded, _ = save_preprocess(content, validate)
        strategy = _PlanOnly(BACKEND, VERSION, thread_count=1)
        strategy.async_save(sharded, folder)
        self._writer, self._metadata = strategy.writer, strategy.metadata
        self._buckets = FileSystemWriterAsync.preload_tensors(self._writer.write_buckets)

    def write(self) -> WrittenParts:
        """Write this rank's files.

        Raises:
            OSError: the disk does not take them.
        """
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        results: list[Any] = []
        for number, bucket in enumerate(self._buckets):
            outcome: queue.Queue[Any] = queue.Queue()
            todo: queue.Queue[int] = queue.Queue()
            todo.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, number, bucket, outcome, todo, use_fsync=True
            )
            _, result = outcome.get()
            if isinstance(result, Exception):
                raise self._as_os_error(result)
            results += result
        return WrittenParts([bucket[1] for bucket in self._buckets], results)

    def complete(self, everyone: Sequence[WrittenParts]) -> list[str]:
        """Write the index of all ranks' files; for one rank. Returns the names of the files that it adds.

        Raises:
            OSError: the disk does not take them.
        """
        vars(self._metadata).pop("all_local_plans", None)  # the engine's cache of plans
        try:
            self._writer.finish(self._metadata, [parts.results for parts in everyone])
            return write_engine_files(self._folder)
        except RuntimeError as error:
            raise self._as_os_error(error) from error

    def _as_os_error(self, error: Exception) -> OSError:
        """What torch's writer says of a full disk is neither an OSError nor does it name the disk."""
        if isinstance(error, OSError):
            return error
        free = shutil.disk_usage(self._folder).free
        return OSError(f"torch could not write a file; {free / 1e6:,.1f} MB are free on the disk")


@dataclass(frozen=True)
class WrittenParts:
    """Files that a rank wrote, and where in them each tensor lies, as the index needs it."""

    files: list[str]
    results: list[Any]


class ChildProcess:
    """Runs a function in a forked process, which sees memory as it is now, and fetches its result.

    Args:
        function: without arguments; must not use the device or process groups. Its result must be picklable.
    """

    def __init__(self, function: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._results, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_child, args=(function, sender, os.getpid()))
        self._process.start()
        sender.close()

    def wait(self, seconds: float) -> bool:
        """Wait so long at most; whether `result` returns at once."""
        return self._results.poll(seconds)

    def result(self) -> Any:
        """What the function returned; waits for it.

        Raises:
            OSError: it failed, or its process died.
        """
        try:
            result, problem = self._results.recv()
        except EOFError:
            result, problem = None, "the process that writes the checkpoint died"
        self._process.join()
        if problem is not None:
            raise OSError(problem)
        return result


def _run_child(function: Any, sender: Connection, parent: int) -> None:
    gc.disable()  # destructors of device tensors belong to the parent
    _die_with_parent(parent)
    answer: tuple[Any, str | None]
    try:
        answer = (function(), None)
    except Exception as error:  # noqa: BLE001  # handed to the parent
        answer = (None, f"{type(error).__name__}: {error}")
    sender.send(answer)
    sender.close()
    os._exit(0)


def _die_with_parent(parent: int) -> None:
    """A writer that outlives its rank would write into the folder of the restarted one."""
    set_death_signal = 1  # PR_SET_PDEATHSIG; Linux
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def load_sharded(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tensors of a checkpoint, resharded to what `content` asks for; all ranks take part.

    Raises:
        CheckpointError: the folder holds pickles of other classes than a checkpoint needs.
    """
    check_pickles(folder)
    loaded: dict[str, Any] = dist_checkpointing.load(content, str(folder))
    return loaded


def without_extra_state(content: dict[str, Any]) -> dict[str, Any]:
    """A module's sharded state dict without what Transformer Engine would unpickle when it is loaded.

    It is FP8 scales of delayed scaling, which is refused here, and the recipe, which follows from the settings.
    """
    return {key: value for key, value in content.items() if not key.endswith(_EXTRA_STATE)}


def load_weights(module: torch.nn.Module, loaded: dict[str, Any]) -> None:
    """Fill a module with what was loaded; modules with an extra state learn that there is none.

    Raises:
        RuntimeError: a weight is missing, unknown or of another shape.
    """
    expected = (key for key in module.state_dict() if key.endswith(_EXTRA_STATE))
    none = {key: torch.empty(0, dtype=torch.uint8) for key in expected}
    module.load_state_dict({**loaded, **none})


def _load_bytes(self: Any, read_item: Any, value: Any) -> None:
    # as torch's planner does, which reads objects with weights_only=False
    place = self.mappings[read_item.dest_index.fqn]
    set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


MCoreLoadPlanner.load_bytes = _load_bytes
