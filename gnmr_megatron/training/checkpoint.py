"""Checkpoints by megatron-core's dist_checkpointing: complete or not there, readable in any layout."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from gnmr_megatron.control.controller import DecidesRecovery
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.models.discovery import unwrap
from gnmr_megatron.training.optimizer import ClippingOptimizer
from gnmr_megatron.training.state import TrainState

DESCRIPTION = "checkpoint.json"
PARTIAL = ".partial"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written: where, how large, and how long training waited for it."""

    path: Path
    num_bytes: int
    seconds: float


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in a `checkpoints` folder, or None."""
    complete = [
        path
        for path in folder.glob("step_*")
        if (path / DESCRIPTION).exists() and path.suffix != PARTIAL
    ]
    return max(complete, key=lambda path: path.name, default=None)


class Checkpointer:
    """Saves and loads one run's state.

    Args:
        folder: where checkpoints go, one folder a step.
        chunks: DDP-wrapped model chunks of this rank.
        optimizer: optimizer of the chunks.
        scheduler: learning-rate scheduler.
        controller: its state is written in plain values.
        layout: layout of this run.
        identity: what has to be equal on resume, as plain values by dotted key.
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
    ) -> None:
        self._folder = folder
        self._chunks, self._optimizer, self._scheduler = chunks, optimizer, scheduler
        self._controller = controller
        self._layout, self._identity = layout, dict(identity)

    def save(self, state: TrainState) -> SavedCheckpoint:
        """Write a checkpoint; all ranks take part. It gets its name only when it is complete.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        started = time.perf_counter()
        path = self._folder / f"step_{state.step:08d}"
        partial = path.with_name(path.name + PARTIAL)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        content = self._content(is_loading=False)
        content["train_state"] = dataclasses.asdict(state)
        content["controller"] = self._controller.state_dict()
        dist_checkpointing.save(content, str(partial))
        dist.barrier()
        if dist.get_rank() == 0:
            (partial / DESCRIPTION).write_text(
                json.dumps(self._description(state), indent=1) + "\n"
            )
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        dist.barrier()
        num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return SavedCheckpoint(path, num_bytes, time.perf_counter() - started)

    def load(self, path: Path) -> TrainState:
        """Take up a checkpoint of this run, written in this layout or another.

        Raises:
            CheckpointError: it is incomplete, or of another model, tokenizer or unit set.
        """
        description = self._read_description(path)
        same_layout = description["layout"] == self._plain_layout()
        loaded = dist_checkpointing.load(
            self._content(is_loading=True, with_random=same_layout), str(path)
        )
        for key, chunk in self._named_chunks():
            unwrap(chunk).load_state_dict(loaded[key])
        self._optimizer.load_engine_state(loaded["optimizer"])
        self._scheduler.num_steps = 0  # loading adds the saved steps to those counted so far
        self._scheduler.load_state_dict(loaded["scheduler"])
        if same_layout:
            _set_random_state(loaded["random"])
        try:
            if loaded["controller"]:  # a run without control has none: its history starts here
                self._controller.load_state_dict(loaded["controller"])
        except ValueError as error:
            raise CheckpointError(
                f"{path}: {error}; resume with the settings of the saved run"
            ) from error
        return TrainState(**loaded["train_state"])

    def _named_chunks(self) -> list[tuple[str, torch.nn.Module]]:
        if len(self._chunks) == 1:
            return [("model", self._chunks[0])]
        return [(f"model{stage}", chunk) for stage, chunk in enumerate(self._chunks)]

    def _content(self, *, is_loading: bool, with_random: bool = True) -> dict[str, Any]:
        # the engine writes into the metadata it is given: a fresh one each time
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        content: dict[str, Any] = {
            key: unwrap(chunk).sharded_state_dict(metadata=metadata)  # type: ignore[operator]
            for key, chunk in self._named_chunks()
        }
        content["optimizer"] = self._optimizer.engine.sharded_state_dict(
            content, is_loading=is_loading, metadata=metadata
        )
        content["scheduler"] = self._scheduler.state_dict()
        if with_random:
            world, rank = dist.get_world_size(), dist.get_rank()
            content["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
        return content

    def _plain_layout(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self._layout), "world_size": dist.get_world_size()}

    def _description(self, state: TrainState) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "step": state.step,
            "layout": self._plain_layout(),
            "identity": self._identity,
        }

    def _read_description(self, path: Path) -> dict[str, Any]:
        try:
            description: dict[str, Any] = json.loads((path / DESCRIPTION).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: is no complete checkpoint ({error}); choose another one"
            ) from error
        saved = description["identity"]
        different = [key for key in self._identity if saved.get(key) != self._identity[key]]
        if different:
            lines = [
                f"  {key}: saved {saved.get(key)}, now {self._identity[key]}" for key in different
            ]
            raise CheckpointError(
                f"{path}: was saved by another run:\n"
                + "\n".join(lines)
                + "\nresume with the saved settings"
            )
        return description


def _random_state() -> dict[str, Any]:
    state = {
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
