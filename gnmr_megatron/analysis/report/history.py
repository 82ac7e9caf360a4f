"""What a run's events tell, as arrays: one pass over the file, a few numbers kept of each step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.statistics import BoolArray, FloatArray, IntArray
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    DecisionEvent,
    EvaluationEvent,
    Event,
    FaultEvent,
    FinishEvent,
    StartEvent,
    StepEvent,
)
from gnmr_megatron.observability.risk_matrix import MATRIX, UNITS
from gnmr_megatron.observability.spikes import SpikeDetector

REASONS = ("gnmr", "delta_gnmr", "lock", "non_finite", "collapse", "policy")
UNKNOWN_REASON = len(REASONS)


@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """One number a step, in the order of the steps; see StepEvent for those that are not told here.

    Attributes:
        recovered: units on the recovery path in the step.
        switches: units whose path differs from that of the step before.
        spike_bound: loss above which the step counts as a spike; infinite where that cannot be told.
    """

    step: IntArray
    loss: FloatArray
    grad_norm: FloatArray
    tokens: IntArray
    tokens_per_second: FloatArray
    step_seconds: FloatArray
    control_seconds: FloatArray
    over_threshold: IntArray
    riskiest_score: FloatArray
    max_recovered: IntArray
    updated: BoolArray
    recovered: IntArray
    switches: IntArray
    spike_bound: FloatArray

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, kw_only=True)
class RecoveredCells:
    """Each step of each unit on the recovery path, in the order of the steps."""

    step: IntArray
    unit: IntArray


@dataclass(frozen=True, kw_only=True)
class Selections:
    """Each unit that a decision selected, in the order of the steps; in force in step + 1.

    Attributes:
        reason: index into REASONS.
    """

    step: IntArray
    unit: IntArray
    gnmr: FloatArray
    delta_gnmr: FloatArray
    score: FloatArray
    lock: IntArray
    reason: IntArray


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """All of a run's events.

    Attributes:
        units: ids; where the run has a risk matrix, in the order of its columns.
        restarts: first steps of the attempts after the first.
        riskiest: step, unit and score of the highest score; None without a step.
        finish: None while the run goes on, or after a crash.
    """

    units: tuple[str, ...]
    series: StepSeries
    recovered: RecoveredCells
    selections: Selections
    evaluations: tuple[EvaluationEvent, ...]
    checkpoints: tuple[CheckpointEvent, ...]
    faults: tuple[FaultEvent, ...]
    restarts: tuple[int, ...]
    riskiest: tuple[int, str, float] | None
    start: StartEvent
    finish: FinishEvent | None


def read_history(run: RecordedRun) -> RunHistory:
    """Read the events of a run, finished or not.

    Raises:
        DataError: a line is broken, or the steps do not follow each other.
    """
    has_units = (run.folder / UNITS).exists() or (run.folder / MATRIX).exists()
    reading = _Reading(units=run.units.ids if has_units else (), budget=run.starts[0].max_recovered)
    for event in run.events():
        reading.add(event)
    history = reading.history()
    steps = history.series.step
    if (np.diff(steps) <= 0).any():
        where = int(steps[1:][np.diff(steps) <= 0][0])
        raise DataError(
            f"{run.folder}: step {where} stands after a later one in events.jsonl; do two runs write there?"
        )
    return history


STEP_FLOATS = (
    "loss", "grad_norm", "tokens_per_second", "step_seconds", "control_seconds", "riskiest_score",
    "spike_bound",
)  # fmt: skip
STEP_COUNTS = (
    "step", "tokens", "over_threshold", "max_recovered", "updated", "recovered", "switches",
)  # fmt: skip


class _Columns:
    """Columns that grow row by row, eight bytes a number."""

    def __init__(self, floats: Sequence[str], counts: Sequence[str]) -> None:
        self._floats = {name: array("d") for name in floats}
        self._counts = {name: array("q") for name in counts}

    def append(self, **row: float) -> None:
        """Add a value to each column."""
        for name, floats in self._floats.items():
            floats.append(row[name])
        for name, counts in self._counts.items():
            counts.append(int(row[name]))

    def arrays(self) -> dict[str, Any]:
        """The columns as arrays."""
        return {name: np.asarray(values) for name, values in (self._floats | self._counts).items()}


@dataclass
class _Reading:
    """What is gathered on the way; arrays, since a long run does not fit in memory as objects."""

    units: tuple[str, ...]
    budget: int
    steps: _Columns = field(default_factory=lambda: _Columns(STEP_FLOATS, STEP_COUNTS))
    recovered: _Columns = field(default_factory=lambda: _Columns((), ("step", "unit")))
    selections: _Columns = field(
        default_factory=lambda: _Columns(
            ("gnmr", "delta_gnmr", "score"), ("step", "unit", "lock", "reason")
        )
    )
    evaluations: list[EvaluationEvent] = field(default_factory=list)
    checkpoints: list[CheckpointEvent] = field(default_factory=list)
    faults: list[FaultEvent] = field(default_factory=list)
    starts: list[StartEvent] = field(default_factory=list)
    finish: FinishEvent | None = None
    riskiest: tuple[int, str, float] | None = None

    def __post_init__(self) -> None:
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._before: set[str] | None = None
        self._spikes = SpikeDetector()

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, StepEvent):
            self._add_step(event)
        elif isinstance(event, DecisionEvent):
            self._add_decision(event)
        elif isinstance(event, EvaluationEvent):
            self.evaluations.append(event)
        elif isinstance(event, CheckpointEvent):
            self.checkpoints.append(event)
        elif isinstance(event, FaultEvent):
            self.faults.append(event)
        elif isinstance(event, StartEvent):
            self.starts.append(event)
            self.budget, self.finish = event.max_recovered, None
        elif isinstance(event, FinishEvent):
            self.finish = event

    def _add_step(self, event: StepEvent) -> None:
        now = set(event.recovered)
        self.steps.append(
            step=event.step,
            loss=event.loss,
            grad_norm=event.grad_norm,
            tokens=event.tokens,
            tokens_per_second=event.tokens_per_second,
            step_seconds=event.step_seconds,
            control_seconds=event.control_seconds,
            over_threshold=event.over_threshold,
            riskiest_score=event.riskiest_score,
            max_recovered=self.budget if event.max_recovered is None else event.max_recovered,
            updated=event.updated,
            recovered=len(now),
            switches=len(now ^ (now if self._before is None else self._before)),
            spike_bound=self._spikes.threshold(),
        )
        self._spikes.add(event.loss)
        self._before = now
        for unit in event.recovered:
            self.recovered.append(step=event.step, unit=self._unit(unit))
        if event.riskiest_unit is not None and (
            self.riskiest is None or event.riskiest_score > self.riskiest[2]
        ):
            self.riskiest = (event.step, event.riskiest_unit, event.riskiest_score)

    def _add_decision(self, event: DecisionEvent) -> None:
        for unit in event.selected:
            known = unit.reason in REASONS
            self.selections.append(
                step=event.step,
                unit=self._unit(unit.unit),
                gnmr=unit.gnmr,
                delta_gnmr=unit.delta_gnmr,
                score=unit.score,
                lock=unit.lock,
                reason=REASONS.index(unit.reason) if known else UNKNOWN_REASON,
            )

    def _unit(self, unit: str) -> int:
        """Index of a unit; one that the matrix does not have comes behind those that it has."""
        return self._index.setdefault(unit, len(self._index))

    def history(self) -> RunHistory:
        """All that was gathered."""
        columns = self.steps.arrays()
        columns["updated"] = columns["updated"].astype(np.bool_)
        return RunHistory(
            units=tuple(self._index),
            series=StepSeries(**columns),
            recovered=RecoveredCells(**self.recovered.arrays()),
            selections=Selections(**self.selections.arrays()),
            evaluations=tuple(self.evaluations),
            checkpoints=tuple(self.checkpoints),
            faults=tuple(self.faults),
            restarts=tuple(start.step for start in self.starts[1:]),
            riskiest=self.riskiest,
            start=self.starts[-1],
            finish=self.finish,
        )
