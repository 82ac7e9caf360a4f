"""The training step: forward and backward, one reduction of norms, update, decision, switch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gnmr_megatron.control.controller import DecidesRecovery, Decision
from gnmr_megatron.data.batches import Batch
from gnmr_megatron.distributed.consensus import MeasuresNorms, UnitNorms
from gnmr_megatron.models.switchboard import Switchboard
from gnmr_megatron.training.optimizer import ClippingOptimizer
from gnmr_megatron.training.pipeline import NOTHING_TO_TELL, BatchLoss, RankStatus, RunsBatches


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        batch: loss and tokens, and what any rank had to tell.
        norms: gradient norms before clipping.
        updated: whether the weights changed; not where loss or gradient were not finite.
        learning_rate: of this step.
        decision: recovery set of the next step, and why.
        control_seconds: time to decide; measuring norms takes the place of the engine's own.
    """

    batch: BatchLoss
    norms: UnitNorms
    updated: bool
    learning_rate: float
    decision: Decision
    control_seconds: float


@dataclass(frozen=True)
class TrainStep:
    """The parts of a step; each stands for itself and can be another of the same interface."""

    model: RunsBatches
    optimizer: ClippingOptimizer
    scheduler: Any
    consensus: MeasuresNorms
    controller: DecidesRecovery
    switchboard: Switchboard

    def __call__(
        self, batches: Sequence[Batch], *, step: int, status: RankStatus = NOTHING_TO_TELL
    ) -> StepResult:
        """Take one optimizer step.

        Args:
            batches: microbatches of this data-parallel rank.
            step: 1-based number of this step.
            status: what this rank has to tell all others.
        """
        self.switchboard.start_step(step)  # every forward and backward of the step sees one path
        self.model.zero_grad_buffers()
        self.optimizer.zero_grad()
        batch = self.model.forward_backward(batches, status)
        found_inf = self.optimizer.prepare_grads()  # gradients are reduced and unscaled now
        norms = self.consensus.unit_norms()  # the only reduction of norms; also what clipping needs
        is_finite = not found_inf and math.isfinite(batch.loss) and math.isfinite(norms.global_norm)
        learning_rate = self.optimizer.learning_rate
        updated = is_finite and self.optimizer.clip_and_step(norms.global_norm)
        if updated:
            self.scheduler.step(1)

        started = time.perf_counter()
        decision = self.controller.decide(norms.per_unit, step=step, updated=updated)
        self.switchboard.request(decision.recovery_set)  # in force from the next step
        return StepResult(
            batch, norms, updated, learning_rate, decision, time.perf_counter() - started
        )
