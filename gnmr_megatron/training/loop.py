"""The loop: when to step, log, evaluate, save and stop."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from megatron.core import parallel_state

from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.data.batches import Batch, GivesBatches, TrainBatches
from gnmr_megatron.distributed.consensus import verify_decision
from gnmr_megatron.distributed.process_groups import gather_from_all
from gnmr_megatron.distributed.watchdog import Watchdog
from gnmr_megatron.errors import DivergenceError
from gnmr_megatron.training.config import TrainSettings
from gnmr_megatron.training.evaluation import Evaluation
from gnmr_megatron.training.interruption import Interruption
from gnmr_megatron.training.oracle import LooksAhead
from gnmr_megatron.training.pipeline import RankStatus
from gnmr_megatron.training.recorder import RecordsRun
from gnmr_megatron.training.saving import Saving
from gnmr_megatron.training.state import TrainState
from gnmr_megatron.training.step import StepResult, TrainStep
from gnmr_megatron.training.supervision import lost_ranks, names_of, stop_without_checkpoint

FinishReason = Literal["completed", "signal"]


@dataclass(frozen=True)
class TrainingBatches:
    """The microbatches of one step after the other, from the position where the run stands."""

    source: TrainBatches
    microbatches: int

    @classmethod
    def of(
        cls, dataset: Any, settings: TrainSettings, state: TrainState, *, num_workers: int
    ) -> TrainingBatches:
        """This replica's share of the training set from `state.consumed_samples` on."""
        replicas = parallel_state.get_data_parallel_world_size()
        source = TrainBatches(
            dataset,
            micro_batch_size=settings.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=replicas,
            consumed_samples=state.consumed_samples,
            num_workers=num_workers,
        )
        return cls(source, settings.global_batch_size // (settings.micro_batch_size * replicas))

    def next_step(self) -> list[Batch]:
        """Microbatches of the coming step."""
        return [next(self.source) for _ in range(self.microbatches)]


@dataclass(frozen=True)
class Trainer:
    """A run that is set up: `train` takes it to its last step."""

    settings: TrainSettings
    check_interval: int
    state: TrainState
    step: TrainStep
    batches: GivesBatches
    evaluation: Evaluation
    saving: Saving
    recorder: RecordsRun
    units: UnitTable
    watchdog: Watchdog
    oracle: LooksAhead

    def train(self) -> FinishReason:
        """Train to the last step, or to the step after which a signal asked to stop.

        Raises:
            DivergenceError: too many steps in a row were not finite; names the units.
            ConsensusError: ranks took different decisions.
            CheckpointError: the last step could not be saved.
            ClusterError: ranks were lost.
        """
        interruption = Interruption(self.saving.settings.stop_seconds, self._stop_late)
        with self.watchdog, interruption:
            try:
                is_complete = self._take_steps(interruption)
            except RuntimeError as error:  # what collectives raise
                # torchrun has sent a signal by now; while that is only noted, there is time to look around
                lost = lost_ranks(self.watchdog, self.recorder, error)
                if lost is None:
                    raise
                raise lost from error
        reason: FinishReason = "completed" if is_complete else "signal"
        self.recorder.finish(self.state, reason=reason)
        return reason

    def _take_steps(self, interruption: Interruption) -> bool:
        """Train and save; returns whether all steps are done."""
        stopped = False
        while self.state.step < self.settings.steps and not stopped:
            result = self._one_step(stop_requested=interruption.is_requested)
            stopped = result.batch.stop_requested
            if self._is_due(self.settings.eval_interval) and not stopped:
                self._evaluate()
        is_complete = self.state.step >= self.settings.steps
        if (
            is_complete
            and self.settings.eval_interval
            and not self._is_due(self.settings.eval_interval)
        ):
            self._evaluate()
        self.watchdog.progress(self.state.step, "saving")
        self.saving.at_end(self.state, "final" if is_complete else "signal")
        return is_complete

    def _one_step(self, *, stop_requested: bool) -> StepResult:
        started = time.perf_counter()
        number = self.state.step + 1
        self.watchdog.progress(number, "reading data")
        batches = self.batches.next_step()
        self.watchdog.progress(number, "measuring recovery gaps")
        started += self.oracle.before_step(number, batches)
        recovered = self.step.controller.recovery_set
        self.watchdog.progress(number, "training")
        status = RankStatus(stop_requested=stop_requested, is_writing=self.saving.is_writing)
        result = self.step(batches, step=number, status=status)
        self.state.step = number
        self.state.consumed_samples += self.settings.global_batch_size
        self.state.consumed_tokens += result.batch.tokens
        if self.check_interval and number % self.check_interval == 0:
            verify_decision(result.decision)
        self.recorder.step(self.state, result, recovered, seconds=time.perf_counter() - started)
        self._note_skip(result)
        self.watchdog.progress(number, "saving")
        self.saving.after_step(self.state, anyone_writes=result.batch.is_writing)
        return result

    def _evaluate(self) -> None:
        self.watchdog.progress(self.state.step, "evaluating")
        self.recorder.evaluation(self.state.step, self.evaluation(self.watchdog.still_there))

    def _stop_late(self) -> None:
        """A signal asked to stop, and time is up; called by a thread."""
        stop_without_checkpoint(
            self.recorder,
            self.state.step,
            self.saving.saved_step,
            self.saving.settings.stop_seconds,
        )

    def _note_skip(self, result: StepResult) -> None:
        """Count steps that were not finite, tell about them, and stop when there are too many in a row."""
        if result.updated:
            self.state.skipped_in_a_row = 0
            return
        self.state.skipped_in_a_row += 1
        broken = self._not_finite(result)
        is_loss = not np.isfinite(result.batch.loss)
        finite = gather_from_all(self.step.consensus.is_finite_here())
        ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        self.recorder.fault(
            self.state.step,
            kind="non_finite_loss" if is_loss else "non_finite_gradient",
            rank=ranks[0] if len(ranks) == 1 else None,
            units=broken,
            message=f"{'loss' if is_loss else 'gradient'} is not finite"
            + (f" on {names_of(ranks)}" if ranks else "")
            + ": the step is skipped",
        )
        self._note_broken_inputs()
        if self.state.skipped_in_a_row >= self.settings.max_skipped_steps:
            self.recorder.finish(self.state, reason="diverged")
            shown = ", ".join(broken[:5]) + (
                f" and {len(broken) - 5} more" if len(broken) > 5 else ""
            )
            raise DivergenceError(
                f"step {self.state.step}: loss or gradient was not finite for {self.state.skipped_in_a_row} steps "
                f"in a row (train.max_skipped_steps); units with gradients that are not finite: "
                f"{shown or 'none, the rest of the model'}. Resume from the last checkpoint with a lower "
                "optimizer.lr or a higher gnmr.max_recovered"
            )

    def _note_broken_inputs(self) -> None:
        """Tell which linears quantised NaN or infinity; all ranks come here after the same step."""
        blocks: Counter[str] = Counter()
        for counts in gather_from_all(self.step.switchboard.take_non_finite()):
            blocks.update(counts)
        if blocks:
            self.recorder.fault(
                self.state.step,
                kind="non_finite_quantized",
                units=sorted(blocks),
                message=f"NaN or infinity in {blocks.total()} blocks of values that {len(blocks)} linears quantised",
            )

    def _not_finite(self, result: StepResult) -> list[str]:
        return [
            self.units.ids[index] for index in np.flatnonzero(~np.isfinite(result.norms.per_unit))
        ]

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.state.step % interval == 0
