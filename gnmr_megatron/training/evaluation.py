"""Held-out loss, on the same sequences each time and on the recovery paths where there is control."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state

from gnmr_megatron.data.batches import Batch, fixed_batches
from gnmr_megatron.models.switchboard import Switchboard
from gnmr_megatron.training.config import TrainSettings
from gnmr_megatron.training.pipeline import PipelinedModel


@dataclass(frozen=True)
class HeldOutLoss:
    """Result of an evaluation: mean cross-entropy in nats a token."""

    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """Evaluates with all units on their recovery paths, or on their low ones where control is disabled.

    The controller never hears of it.
    """

    batches: Sequence[Batch]
    model: PipelinedModel
    switchboard: Switchboard
    on_recovery: bool

    @classmethod
    def of(
        cls,
        dataset: Any,
        settings: TrainSettings,
        model: PipelinedModel,
        switchboard: Switchboard,
        *,
        on_recovery: bool,
    ) -> Evaluation:
        """Take the first `train.eval_samples` held-out sequences; this replica's share of them."""
        batches = fixed_batches(
            dataset,
            num_samples=settings.eval_samples,
            micro_batch_size=settings.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
        )
        return cls(list(batches), model, switchboard, on_recovery)

    def __call__(self, progress: Callable[[], None] = lambda: None) -> HeldOutLoss:
        """Evaluate; all ranks take part and learn the same result.

        Args:
            progress: called before each microbatch.
        """
        started = time.perf_counter()
        with self.switchboard.evaluating(on_recovery=self.on_recovery):
            result = self.model.evaluate(_Told(self.batches, progress))
        return HeldOutLoss(result.loss, result.tokens, time.perf_counter() - started)


class _Told(Sequence[Batch]):
    """Batches that tell when one is taken."""

    def __init__(self, batches: Sequence[Batch], tell: Callable[[], None]) -> None:
        self._batches, self._tell = batches, tell

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._tell()
            yield batch
