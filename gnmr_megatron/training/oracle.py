"""The recovery gap of each unit: how much of the gradient's error recovering it would remove, on the same batch.

A measurement for judging policies, and a policy itself: an upper bound, since it looks at the batch before it decides.
It costs as many forward and backward passes as there are units, or two where paths differ in what they save only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.statistics import FloatArray
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.data.batches import Batch
from gnmr_megatron.distributed.ownership import OwnedGradient
from gnmr_megatron.models.switchboard import Switchboard
from gnmr_megatron.training.pipeline import RunsBatches
from gnmr_megatron.training.random_state import random_state, set_random_state


@dataclass(frozen=True)
class RecoveryGaps:
    """What was measured on one batch; squared norms over the whole model.

    Attributes:
        per_unit: [units] float64 error with all units low, less error with the unit recovered.
        error: error with all units low.
        reference: of the gradient with every unit recovered, against which errors are.
    """

    per_unit: FloatArray
    error: float
    reference: float


class LooksAhead(Protocol):
    """What the loop asks before each step."""

    def before_step(self, step: int, batches: Sequence[Batch]) -> float:
        """Measure where it is due, and let the controller know; returns the seconds it took."""


class NoOracle:
    """Measures nothing."""

    def before_step(self, step: int, batches: Sequence[Batch]) -> float:
        """Nothing, in no time."""
        return 0.0


class Oracle:
    """Measures recovery gaps every so many steps.

    Args:
        interval: in steps.
        model: the model's chunks on this rank.
        owned: the pieces of gradient that this rank speaks for.
        units: all units.
        switchboard: puts units on paths.
        controller: is told under policy `oracle`.
        record: takes step, measurement and its seconds.
        device: of the gradients; a rank that owns none takes part, too.
        is_separable: whether a unit's path changes its own weight gradient and nothing else; then two passes do.
    """

    def __init__(
        self,
        interval: int,
        *,
        model: RunsBatches,
        owned: Sequence[OwnedGradient],
        units: UnitTable,
        switchboard: Switchboard,
        controller: Controller,
        record: Callable[[int, RecoveryGaps, float], None],
        device: torch.device,
        is_separable: bool,
    ) -> None:
        self._interval, self._model, self._owned = interval, model, list(owned)
        self._units, self._switchboard = units, switchboard
        self._controller, self._record = controller, record
        self._device, self._is_separable = device, is_separable

    def before_step(self, step: int, batches: Sequence[Batch]) -> float:
        """See `LooksAhead`; all ranks take part."""
        if (step - 1) % self._interval:
            return 0.0
        started = time.perf_counter()
        gaps = self.measure(step, batches)
        if self._controller.config.policy == "oracle":
            self._switchboard.request(self._controller.foresee(gaps.per_unit))
        seconds = time.perf_counter() - started
        self._record(step, gaps, seconds)
        return seconds

    def measure(self, step: int, batches: Sequence[Batch]) -> RecoveryGaps:
        """Run the batch with all units recovered, with none, and with each alone; gradients are left overwritten."""
        num_units, ids = len(self._units), self._units.ids
        exact = [gradient.clone() for gradient in self._gradients(ids, step, batches)]
        sums = [self._errors(exact, self._gradients((), step, batches)), self._squares(exact)]
        if not self._is_separable:
            sums += [self._errors(exact, self._gradients((unit,), step, batches)) for unit in ids]
        everyone = torch.stack(sums)
        dist.all_reduce(everyone)
        low_parts, reference, *alone = everyone.cpu().numpy()
        error = float(low_parts.sum())
        gaps = (
            low_parts[:num_units].copy()
            if self._is_separable
            else np.array([error - float(parts.sum()) for parts in alone])
        )
        return RecoveryGaps(gaps, error, float(reference.sum()))

    def _gradients(
        self, recovered: Collection[str], step: int, batches: Sequence[Batch]
    ) -> list[Tensor]:
        self._switchboard.try_out(recovered, step)
        self._model.zero_grad_buffers()
        # each pass draws the dropout that the step itself will draw
        before = random_state()
        self._model.forward_backward(batches)
        set_random_state(before)
        return [piece.gradient for piece in self._owned]

    def _errors(self, exact: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
        """[units + 1] float64 squared distance of this rank's pieces, by slot of the risk vector."""
        return self._squares(ours - theirs for ours, theirs in zip(exact, other, strict=True))

    def _squares(self, pieces: Iterable[Tensor]) -> Tensor:
        """[units + 1] float64 sums of squares of this rank's pieces, by slot of the risk vector."""
        sums = torch.zeros(len(self._units) + 1, dtype=torch.float64, device=self._device)
        for owned, piece in zip(self._owned, pieces, strict=True):
            sums[owned.slot] += piece.double().square().sum()
        return sums
