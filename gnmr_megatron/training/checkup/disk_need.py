"""What a run needs of the disk, worked out from its settings. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gnmr_megatron.observability.risk_matrix import risk_matrix_dtype
from gnmr_megatron.training.checkpoint_files import checkpoint_path, expendable
from gnmr_megatron.training.config import RunConfig

# of a checkpoint, measured: beside the values of a tensor, the random state of a rank, the index
TENSOR_BYTES = 1_750
RANDOM_BYTES = 22_430
INDEX_BYTES = 25_000
EVENT_BYTES = 1_500
"""Events of a step: its own and that of the decision."""


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """Bytes that a run folder comes to.

    Attributes:
        checkpoint: one checkpoint.
        checkpoints: most of them at a time, the one in writing included.
        records: events and the risk matrix.
    """

    checkpoint: int
    checkpoints: int
    records: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.checkpoint * self.checkpoints + self.records


def disk_need(config: RunConfig, *, vocab_size: int, world_size: int) -> DiskNeed:
    """What the run folder comes to, without what W&B writes there."""
    units = sum(not plan.is_fixed for plan in config.unit_plans())
    matrix = 0 if config.gnmr.mode == "disabled" else risk_matrix_dtype(units).itemsize
    return DiskNeed(
        checkpoint=checkpoint_bytes(config, vocab_size=vocab_size, world_size=world_size),
        checkpoints=checkpoints_at_once(config),
        records=config.train.steps * (matrix + EVENT_BYTES),
    )


def checkpoint_bytes(config: RunConfig, *, vocab_size: int, world_size: int) -> int:
    """Bytes of one checkpoint, all ranks' files together: weights, two moments, and main parameters where there are.

    The distributed optimizer saves main parameters of an FP32 model, too.
    """
    model, layout = config.model, config.parallel
    has_main = model.dtype == "bf16" or layout.use_distributed_optimizer
    a_value = (2 if model.dtype == "bf16" else 4) + 8 + (4 if has_main else 0)
    tensor = layout.tensor_model_parallel_size
    # of a layer: five tensors that are split over tensor-parallel ranks (gate and up are two), and two norms
    tensors = model.num_layers * (5 * tensor + 2) + 2 * tensor + 1
    return (
        a_value * model.num_parameters(vocab_size)
        + tensors * (4 if has_main else 3) * TENSOR_BYTES
        + world_size * RANDOM_BYTES
        + INDEX_BYTES
    )


def checkpoints_at_once(config: RunConfig) -> int:
    """Most checkpoints that lie on the disk at a time: those kept before the last save, and that one."""
    steps, interval = config.train.steps, config.checkpoint.interval
    saved = {*(range(interval, steps + 1, interval) if interval else ()), steps}
    before = [checkpoint_path(Path(), step) for step in sorted(saved)[:-1]]
    going = expendable(
        before, keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every
    )
    return len(before) - len(going) + 1
