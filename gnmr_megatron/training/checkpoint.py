"""Checkpoints by megatron-core's dist_checkpointing: complete or not there, readable in any layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from gnmr_megatron.control.controller import DecidesRecovery
from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.checkpoint_index import check_pickles
from gnmr_megatron.distributed.engine_checkpoint import (
    ChildProcess,
    PlannedSave,
    WrittenParts,
    load_sharded,
    load_weights,
    without_extra_state,
)
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.process_groups import gather_from_all
from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.models.discovery import unwrap
from gnmr_megatron.models.lora import MARK
from gnmr_megatron.training.checkpoint_files import (
    PARTIAL,
    CheckpointDescription,
    WrittenFile,
    checkpoint_path,
    complete_checkpoints,
    damages,
    expendable,
    newest_good,
    publish,
    remove,
)
from gnmr_megatron.training.config import CheckpointSettings
from gnmr_megatron.training.identity import LORA_BASE, differences
from gnmr_megatron.training.optimizer import ClippingOptimizer
from gnmr_megatron.training.optimizer_state import OptimizerState, kind_of
from gnmr_megatron.training.random_state import random_state, set_random_state
from gnmr_megatron.training.state import TrainState

LOOK_SECONDS = 5.0
"""How often to look whether files of a save grow."""

# the engine writes into the metadata it is given: copied each time
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written.

    Attributes:
        path: its folder.
        step: steps done.
        num_bytes: size of its files.
        seconds: from the start of the save to its end.
        blocked_seconds: how long training waited for it.
    """

    path: Path
    step: int
    num_bytes: int
    seconds: float
    blocked_seconds: float


@dataclass
class _RunningSave:
    """A save that was started and is not finished yet."""

    description: CheckpointDescription
    partial: Path
    plan: PlannedSave
    writer: ChildProcess
    started: float
    blocked_seconds: float


class Checkpointer:
    """Saves and loads one run's state; a save runs in the background between `start` and `finish`.

    Args:
        folder: where checkpoints go, one folder a step.
        chunks: DDP-wrapped model chunks of this rank.
        optimizer: optimizer of the chunks.
        scheduler: learning-rate scheduler.
        controller: its state is written in plain values.
        layout: layout of this run.
        identity: what has to be equal on resume, as plain values by dotted key.
        settings: how many checkpoints to keep.
        base: checkpoint of the frozen weights under adapters; only the adapters are saved then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chunks: Sequence[torch.nn.Module],
        optimizer: ClippingOptimizer,
        scheduler: Any,
        controller: DecidesRecovery,
        layout: ParallelLayout,
        identity: Mapping[str, Any],
        settings: CheckpointSettings,
        base: Path | None = None,
    ) -> None:
        self._folder, self._base = folder, base
        self._chunks, self._optimizer, self._scheduler = chunks, optimizer, scheduler
        self._controller = controller
        self._layout, self._identity, self._settings = layout, dict(identity), settings
        self._running: _RunningSave | None = None
        self._is_first_save = True

    @property
    def is_saving(self) -> bool:
        """Whether a save was started and is not finished; equal on all ranks."""
        return self._running is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of a save is still being written."""
        return self._running is not None and not self._running.writer.wait(0)

    def save(self, state: TrainState) -> SavedCheckpoint:
        """Write a checkpoint and wait for it; all ranks take part.

        Raises:
            CheckpointError: it cannot be written; alike on every rank.
        """
        self.start(state)
        return self.finish()

    def start(self, state: TrainState) -> None:
        """Begin a save of the state as it is now; all ranks take part.

        Raises:
            CheckpointError: the folder cannot be written; alike on every rank.
        """
        started = time.perf_counter()
        path = checkpoint_path(self._folder, state.step)
        partial = path.with_name(path.name + PARTIAL)
        with _agreed_errors(path):
            if dist.get_rank() == 0:
                if partial.exists():
                    remove(partial)
                partial.mkdir(parents=True)
        with engine_compat.gathered_parameters(self._chunks):
            content, optimizer = self._content(with_random=True)
        description = CheckpointDescription(
            step=state.step,
            layout=self._plain_layout(),
            identity=self._identity,
            optimizer=kind_of(self._optimizer.engine),
            state={
                "train": dataclasses.asdict(state),
                "scheduler": self._scheduler.state_dict(),
                "controller": self._controller.state_dict(),
                "num_updates": optimizer.num_updates,
                **({} if self._base is None else {"base": str(self._base.resolve())}),
            },
            files={},
        )
        plan = PlannedSave(content, partial, validate=self._is_first_save)
        self._is_first_save = False
        writer = ChildProcess(functools.partial(_write, plan, partial))
        blocked = time.perf_counter() - started
        self._running = _RunningSave(description, partial, plan, writer, started, blocked)

    def finish(self, progress: Callable[[], None] = lambda: None) -> SavedCheckpoint:
        """Wait for all ranks' files and give the checkpoint its name; all ranks take part.

        Args:
            progress: called now and then while this rank's files grow.

        Raises:
            CheckpointError: a rank could not write; alike on every rank, and nothing of it remains.
        """
        waiting_since = time.perf_counter()
        save, self._running = self._running, None
        assert save is not None
        path = checkpoint_path(self._folder, save.description.step)
        own: tuple[WrittenParts, dict[str, WrittenFile]] | str
        try:
            size = 0
            while not save.writer.wait(LOOK_SECONDS):
                if (now_written := _written_bytes(save.partial)) != size:
                    size = now_written
                    progress()
            own = save.writer.result()
        except OSError as error:
            own = str(error)
        written: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, written if dist.get_rank() == 0 else None)
        num_bytes = 0
        with _agreed_errors(path):
            if dist.get_rank() == 0:
                try:
                    num_bytes = self._complete(save, path, written)
                except OSError:
                    with contextlib.suppress(OSError):
                        remove(save.partial)
                    raise
        now = time.perf_counter()
        return SavedCheckpoint(
            path,
            save.description.step,
            num_bytes,
            seconds=now - save.started,
            blocked_seconds=save.blocked_seconds + now - waiting_since,
        )

    def _complete(self, save: _RunningSave, path: Path, written: Sequence[Any]) -> int:
        """On one rank: index, description, name; then let older checkpoints go."""
        problems = [
            f"rank {rank}: {problem}"
            for rank, problem in enumerate(written)
            if isinstance(problem, str)
        ]
        if problems:
            raise OSError("; ".join(problems[:3]))
        files = {name: file for _, sums in written for name, file in sums.items()}
        for name in save.plan.complete([parts for parts, _ in written]):
            files[name] = WrittenFile.of(save.partial / name)
        description = dataclasses.replace(save.description, files=files)
        description.write(save.partial)
        publish(save.partial, path)
        for old in expendable(
            complete_checkpoints(self._folder),
            keep_last=self._settings.keep_last,
            keep_every=self._settings.keep_every,
        ):
            with contextlib.suppress(OSError):  # tried again after the next save
                remove(old)
        return description.num_bytes

    def load(self, path: Path) -> TrainState:
        """Take up a checkpoint of this run, written in this layout or another; all ranks take part.

        Important:
            `check` it first.

        Raises:
            CheckpointError: it is of another model, tokenizer or unit set; alike on every rank.
        """
        description = CheckpointDescription.read(path)
        self._check_identity(path, description)
        same_layout = description.layout == self._plain_layout()
        content, optimizer = self._content(
            with_random=same_layout, is_loading=True, saved_optimizer=description.optimizer
        )
        loaded = load_sharded(content, path)
        self._fill_chunks(loaded)
        state = description.state
        optimizer.load(loaded["optimizer"], num_updates=state["num_updates"])
        self._scheduler.num_steps = 0  # loading adds the saved steps to those counted so far
        self._scheduler.load_state_dict(state["scheduler"])
        if same_layout:
            set_random_state(loaded["random"])
        try:
            if state["controller"]:  # a run without control has none: its history starts here
                self._controller.load_state_dict(state["controller"])
        except ValueError as error:
            raise CheckpointError(
                f"{path}: {error}; resume with the settings of the saved run"
            ) from error
        return TrainState(**state["train"])

    def take_weights(self, path: Path) -> None:
        """Start from the weights of another run, and from nothing else of it; all ranks take part.

        Important:
            `check` it first; that it is of this model is checked by `initial_weights`.
        """
        self._fill_chunks(load_sharded(self._weights(), path))
        self._optimizer.engine.reload_model_params()

    def check(self, path: Path) -> None:
        """Compare all files with their checksums, each rank its share.

        Raises:
            CheckpointError: it is damaged or unsafe; on every rank; names the files, and the newest checkpoint
                before it that is whole.
        """
        check_checkpoint(path)

    def _content(
        self, *, with_random: bool, is_loading: bool = False, saved_optimizer: str | None = None
    ) -> tuple[dict[str, Any], OptimizerState]:
        content = self._weights()
        optimizer = OptimizerState(
            self._optimizer.engine,
            content,
            _METADATA,
            is_loading=is_loading,
            saved_kind=saved_optimizer,
        )
        content["optimizer"] = optimizer.tensors
        if with_random:
            world, rank = dist.get_world_size(), dist.get_rank()
            content["random"] = ShardedObject("random", random_state(), (world,), (rank,))
        return content, optimizer

    def _weights(self) -> dict[str, Any]:
        return sharded_weights(self._chunks, only_adapters=self._base is not None)

    def _fill_chunks(self, loaded: Mapping[str, Any]) -> None:
        for key, chunk in _named(self._chunks):
            model = unwrap(chunk)
            others = {} if self._base is None else model.state_dict()
            load_weights(model, {**others, **loaded[key]})

    def _plain_layout(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self._layout), "world_size": dist.get_world_size()}

    def _check_identity(self, path: Path, description: CheckpointDescription) -> None:
        lines = differences(description.identity, self._identity)
        if self._base is not None and [line.partition(":")[0] for line in lines] == [LORA_BASE]:
            raise CheckpointError(
                f"{path}: its adapters were trained on other frozen weights than those of {self._base}: on those that "
                f"{description.state['base']} had then; name these with --lora.base (and "
                "--init_from=null where that named them), or start a new run on the others"
            )
        if lines:
            raise CheckpointError(
                f"{path}: was saved by another run:\n"
                + "\n".join(f"  {line}" for line in lines)
                + "\nresume with the saved settings"
            )


def sharded_weights(
    chunks: Sequence[torch.nn.Module], *, only_adapters: bool = False
) -> dict[str, Any]:
    """Sharded state dict of each model chunk, with the chunk's key.

    Layers are stacked into one tensor; but for adapters, which some layers may lack.
    """
    metadata = {**_METADATA, "non_homogeneous_layers": True} if only_adapters else _METADATA
    content = {
        key: without_extra_state(
            unwrap(chunk).sharded_state_dict(metadata=dict(metadata))  # type: ignore[operator]
        )
        for key, chunk in _named(chunks)
    }
    if only_adapters:
        return {
            key: {name: tensor for name, tensor in weights.items() if MARK in name}
            for key, weights in content.items()
        }
    return content


def _named(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{stage}", chunk) for stage, chunk in enumerate(chunks)]


def check_checkpoint(path: Path) -> None:
    """Compare all files of a checkpoint with their checksums, each rank its share.

    Raises:
        CheckpointError: it is damaged or unsafe; on every rank; names the files, and the newest checkpoint
            before it that is whole.
    """
    own = _problems_of_share(path, part=dist.get_rank(), parts=dist.get_world_size())
    found = list(dict.fromkeys(line for lines in gather_from_all(own) for line in lines))
    if found:
        advice = gather_from_all(_what_else(path) if dist.get_rank() == 0 else "")[0]
        raise CheckpointError("\n".join([*found, advice]))


def _write(plan: PlannedSave, folder: Path) -> tuple[WrittenParts, dict[str, WrittenFile]]:
    """This rank's files and what they add up to; runs in a process of its own."""
    parts = plan.write()
    return parts, {name: WrittenFile.of(folder / name) for name in parts.files}


@contextlib.contextmanager
def _agreed_errors(path: Path) -> Any:
    """What rank 0 could not do raises on every rank; all ranks take part.

    Raises:
        CheckpointError: an OSError happened within the block on a rank.
    """
    problem: str | None = None
    try:
        yield
    except OSError as error:
        problem = str(error)
    first = next((text for text in gather_from_all(problem) if text is not None), None)
    if first is not None:
        raise CheckpointError(f"{path}: cannot be written: {first}")


def _problems_of_share(path: Path, *, part: int, parts: int) -> list[str]:
    """What one rank finds wrong with its share of the files, and with those that all read."""
    try:
        found = list(damages(path, CheckpointDescription.read(path), part=part, parts=parts))
        if not found:
            check_pickles(path)
    except CheckpointError as error:
        return [str(error)]
    return found


def _written_bytes(folder: Path) -> int:
    """Size of the files of a save that is being written."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def _what_else(path: Path) -> str:
    """What to resume from instead of a damaged checkpoint."""
    earlier = [other for other in complete_checkpoints(path.parent) if other.name < path.name]
    good = newest_good(earlier)
    if good is None:
        return "no whole checkpoint is before it; start the run anew"
    return f"the newest whole checkpoint before it: --resume {good}"
