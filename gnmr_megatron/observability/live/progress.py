"""Where a run stands, added up from its events in constant memory."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FaultEvent,
    FinishEvent,
    StartEvent,
    StepEvent,
)
from gnmr_megatron.observability.live.history import CurveHistory

SMOOTHING = 0.9  # of the step time that the ETA is computed from
RECENT_STEPS = 100
LEAST_PATIENCE = 60.0  # seconds without a step that are worth a word
PATIENCE = 10  # the same in steps


@dataclass
class RunProgress:
    """The newest event of each kind, and curves; it holds no list that grows with the run."""

    start: StartEvent | None = None
    last: StepEvent | None = None
    evaluation: EvaluationEvent | None = None
    checkpoint: CheckpointEvent | None = None
    fault: FaultEvent | None = None
    finish: FinishEvent | None = None
    faults: int = 0
    losses: CurveHistory = field(default_factory=CurveHistory)
    recent: deque[StepEvent] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    step_seconds: float = math.nan
    """Smoothed time of a step; the first one pays for warming up and does not count."""

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, StartEvent):
            self.start, self.finish, self.step_seconds = event, None, math.nan
        elif isinstance(event, StepEvent):
            self._add_step(event)
        elif isinstance(event, EvaluationEvent):
            self.evaluation = event
        elif isinstance(event, CheckpointEvent):
            self.checkpoint = event
        elif isinstance(event, FaultEvent):
            self.fault, self.faults = event, self.faults + 1
        elif isinstance(event, FinishEvent):
            self.finish = event

    def _add_step(self, event: StepEvent) -> None:
        if event.step > self.first_step:
            before = event.step_seconds if math.isnan(self.step_seconds) else self.step_seconds
            self.step_seconds = SMOOTHING * before + (1 - SMOOTHING) * event.step_seconds
        self.last = event
        self.losses.add(event.step, event.loss)
        self.recent.append(event)

    @property
    def first_step(self) -> int:
        """First step of this attempt; 0 where its start isn't known."""
        return self.start.step if self.start else 0

    @property
    def total_steps(self) -> int:
        """Last step of the run; 0 where it isn't known."""
        if self.last is not None and self.last.total_steps:
            return self.last.total_steps
        return self.start.total_steps if self.start else 0

    @property
    def step(self) -> int:
        """Steps done."""
        return self.last.step if self.last else max(self.first_step - 1, 0)

    @property
    def max_recovered(self) -> int:
        """Budget of the last step."""
        if self.last is not None and self.last.max_recovered is not None:
            return self.last.max_recovered
        return self.start.max_recovered if self.start else 0

    @property
    def eta_seconds(self) -> float:
        """Time left at the present pace; NaN where it isn't known."""
        total = self.total_steps
        return (total - self.step) * self.step_seconds if total else math.nan

    @property
    def control_percent(self) -> float:
        """Deciding and switching, of the time of the last steps; NaN before the first one."""
        seconds = sum(event.step_seconds for event in self.recent)
        return 100 * sum(e.control_seconds for e in self.recent) / seconds if seconds else math.nan

    def silent_seconds(self, now: float) -> float | None:
        """Time since the last step, where that is long for this run and it is not over; else None."""
        newest = max(
            (event.time for event in (self.start, self.last) if event is not None), default=now
        )
        usual = 0.0 if math.isnan(self.step_seconds) else self.step_seconds
        silent = now - newest
        is_long = silent > max(LEAST_PATIENCE, PATIENCE * usual)
        return silent if is_long and self.finish is None else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values; None where there is none yet."""
        last, evaluation = self.last, self.evaluation
        eta = self.eta_seconds
        return {
            "run": self.start.run if self.start else None,
            "finished": self.finish.reason if self.finish else None,
            "step": self.step,
            "total_steps": self.total_steps,
            "eta_seconds": eta if math.isfinite(eta) else None,
            "loss": last.loss if last else None,
            "held_out_loss": evaluation.loss if evaluation else None,
            "grad_norm": last.grad_norm if last else None,
            "learning_rate": last.learning_rate if last else None,
            "tokens": last.tokens if last else 0,
            "tokens_per_second": last.tokens_per_second if last else None,
            "recovered": last.recovered if last else [],
            "max_recovered": self.max_recovered,
            "control_percent": self.control_percent if last else None,
            "checkpoint": self.checkpoint.path if self.checkpoint else None,
            "faults": self.faults,
            "last_fault": self.fault.message if self.fault else None,
            "last_step_at": last.time if last else None,
        }
