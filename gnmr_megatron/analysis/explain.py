"""Why a step decided as it did: every number of the decision, worked out again from the recorded norms."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.stretches import Stretch, stretches
from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.statistics import IntArray
from gnmr_megatron.errors import ConfigError, DataError, did_you_mean
from gnmr_megatron.observability.console import short_unit
from gnmr_megatron.observability.events import strict_json

Outcome = Literal["selected", "cut", "no candidate"]


@dataclass(frozen=True, kw_only=True)
class ExplainedUnit:
    """What a decision saw of a unit, and what it made of it.

    Attributes:
        unit: its id.
        norm: gradient norm of the step.
        mean: mean of the norms before it; 0 where there are none.
        recent_mean: mean of the last delta GNMR values; None where there are fewer.
        gnmr: norm / mean.
        delta_gnmr: gnmr / recent_mean.
        score: above 1 is risky.
        rank: its place among the candidates, from 1 on; None for others.
        outcome: `cut` is a candidate for which the budget had no place.
        reason: why it was a candidate: gnmr, delta_gnmr, collapse, non_finite, policy or lock; None for others.
        lock_before: further steps for which it was a candidate anyway, before the decision.
        lock_after: the same after it.
        recovered: whether it was on the recovery path in this very step.
    """

    unit: str
    norm: float
    mean: float
    recent_mean: float | None
    gnmr: float
    delta_gnmr: float
    score: float
    rank: int | None
    outcome: Outcome
    reason: str | None
    lock_before: int
    lock_after: int
    recovered: bool


@dataclass(frozen=True, kw_only=True)
class ExplainedStep:
    """A decision with all that went into it.

    Attributes:
        run: run folder.
        step: the step whose norms were measured; its decision holds in the next one.
        updated: whether the optimizer took the step.
        mode: of the controller.
        policy: that scored.
        alpha: threshold on GNMR in force.
        beta: threshold on delta-GNMR in force.
        delta: number of GNMR values that delta-GNMR compares with.
        max_recovered: budget in force.
        lock_steps: lock that a selected risky unit gets.
        is_warming_up: whether the step only built history.
        as_recorded: whether the run recorded the same decision.
        units: all units, in the order of the model.
    """

    run: str
    step: int
    updated: bool
    mode: str
    policy: str
    alpha: float
    beta: float
    delta: int
    max_recovered: int
    lock_steps: int
    is_warming_up: bool
    as_recorded: bool
    units: tuple[ExplainedUnit, ...]

    @property
    def candidates(self) -> list[ExplainedUnit]:
        """Those that asked for recovery, riskiest first."""
        found = [unit for unit in self.units if unit.rank is not None]
        return sorted(found, key=lambda unit: unit.rank or 0)

    def unit(self, unit_id: str) -> ExplainedUnit:
        """The unit of this id."""
        return next(unit for unit in self.units if unit.unit == unit_id)

    def as_dict(self, units: Sequence[ExplainedUnit]) -> dict[str, Any]:
        """Plain values for strict JSON, of these units only."""
        values: dict[str, Any] = strict_json(
            dataclasses.asdict(dataclasses.replace(self, units=tuple(units)))
        )
        return values


def explain(run: RecordedRun, step: int) -> ExplainedStep:
    """Work out the decision after a step.

    Raises:
        DataError: the run has no norms of that step; names those that it has.
    """
    recorded = run.matrix.steps
    if step not in recorded:
        raise DataError(f"--step: {run.folder} has no norms of step {step}; {_range(recorded)}")
    wanted = int(np.searchsorted(recorded, step))
    for stretch in stretches(run):
        if wanted in stretch.rows:
            return _explain(stretch, wanted)
        for _ in stretch:
            pass
    raise DataError(f"--step: in step {step} of {run.folder} control was off (gnmr.mode: disabled)")


def _range(steps: IntArray) -> str:
    if not len(steps):
        return "it has none yet"
    gaps = np.flatnonzero(np.diff(steps) != 1)
    starts, ends = [steps[0], *steps[gaps + 1]], [*steps[gaps], steps[-1]]
    parts = [f"{first} to {last}" for first, last in zip(starts, ends, strict=True)]
    return f"it has steps {', '.join(parts)}"


def _explain(stretch: Stretch, wanted: int) -> ExplainedStep:
    controller, matrix = stretch.controller, stretch.run.matrix
    for _ in Stretch(stretch.run, range(stretch.rows.start, wanted), controller, goes_on=True):
        pass
    lock_before = controller.lock.copy()
    is_warming_up = controller.is_warming_up
    recovered = set(controller.recovery_set.tolist())
    history = controller.history
    means = controller.mean_norms, history.recent_mean()
    is_full = history.count >= controller.config.delta
    norms = np.array(matrix.norms[wanted])
    decision = controller.decide(
        norms, step=int(matrix.steps[wanted]), updated=bool(matrix.updated[wanted])
    )
    rank = _ranks(decision)
    selected = set(decision.selected.tolist())

    def unit(index: int) -> ExplainedUnit:
        place = rank.get(index)
        return ExplainedUnit(
            unit=controller.units.ids[index],
            norm=float(norms[index]),
            mean=float(means[0][index]),
            recent_mean=float(means[1][index]) if is_full[index] else None,
            gnmr=float(decision.gnmr[index]),
            delta_gnmr=float(decision.delta_gnmr[index]),
            score=float(decision.score[index]),
            rank=place,
            outcome="selected" if index in selected else "cut" if place else "no candidate",
            reason=None if place is None else decision.reason(index),
            lock_before=int(lock_before[index]),
            lock_after=int(decision.lock[index]),
            recovered=index in recovered,
        )

    config = controller.config
    return ExplainedStep(
        run=str(stretch.run.folder),
        step=decision.step,
        updated=decision.updated,
        mode=config.mode,
        policy=config.policy,
        alpha=decision.alpha,
        beta=decision.beta,
        delta=config.delta,
        max_recovered=decision.max_recovered,
        lock_steps=config.lock_steps,
        is_warming_up=is_warming_up,
        as_recorded=selected == set(np.flatnonzero(matrix.selected[wanted]).tolist()),
        units=tuple(unit(index) for index in range(len(controller.units))),
    )


def _ranks(decision: Decision) -> dict[int, int]:
    """Place of each candidate: by score, equal ones in the order of the units."""
    candidates = np.flatnonzero(decision.candidate)
    order = candidates[np.argsort(-decision.score[candidates], kind="stable")]
    return {int(index): place for place, index in enumerate(order, start=1)}


def matching(explained: ExplainedStep, pattern: str) -> list[ExplainedUnit]:
    """Units whose id, or short name such as `L3.fc1`, matches a glob.

    Raises:
        ConfigError: none does; suggests one.
    """
    names = {unit.unit: (unit.unit, short_unit(unit.unit)) for unit in explained.units}
    found = [
        unit
        for unit in explained.units
        if any(fnmatch.fnmatchcase(name, pattern) for name in names[unit.unit])
    ]
    if not found:
        possible = [name for pair in names.values() for name in pair]
        close = did_you_mean(pattern, possible)
        if "did you mean" not in close:
            close = f"; possible: {possible[0]} or {possible[1]}, and {len(names) - 1} others"
        raise ConfigError(f"--unit: no unit of the run matches `{pattern}`{close}")
    return found
