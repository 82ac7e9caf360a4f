"""Why two runs decided otherwise after the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gnmr_megatron.analysis.explain import ExplainedStep, ExplainedUnit, explain
from gnmr_megatron.analysis.recorded_run import RecordedRun

Cause = Literal["norms", "settings", "locks", "budget", "record"]


@dataclass(frozen=True, kw_only=True)
class DecisionDifference:
    """The first step after which other units were selected, and why.

    Attributes:
        step: after which they were.
        selected: unit ids that either run selected.
        cause: `locks` where the unit was a candidate by its lock in one run only; `budget` where it was a candidate
            in both and had a place in one; else `settings` or `norms`, whichever made it risky in one run only;
            `record` where norms and settings give the same decision, so that one run is not as recorded.
        unit: that `why` is about.
        why: in words.
    """

    step: int
    selected: tuple[tuple[str, ...], tuple[str, ...]]
    cause: Cause
    unit: str
    why: str


def decision_difference(
    left: RecordedRun,
    right: RecordedRun,
    step: int,
    *,
    settings_differ: bool,
    norms_differ: bool,
) -> DecisionDifference:
    """Why two runs selected other units after a step.

    Args:
        left: a run.
        right: another one, of the same units.
        step: the first one after which they did.
        settings_differ: whether settings were others then.
        norms_differ: whether any norm up to it was another, by a bit.
    """
    steps = explain(left, step), explain(right, step)
    chosen = tuple(_recorded(run, step) for run in (left, right))
    unit = next(name for name in left.matrix.units if (name in chosen[0]) != (name in chosen[1]))
    one, other = steps[0].unit(unit), steps[1].unit(unit)
    cause = _cause(steps, (one, other), settings=settings_differ, norms=norms_differ)
    return DecisionDifference(
        step=step,
        selected=(chosen[0], chosen[1]),
        cause=cause,
        unit=unit,
        why=_why(cause, steps, (one, other)),
    )


def _recorded(run: RecordedRun, step: int) -> tuple[str, ...]:
    row = int(np.searchsorted(run.matrix.steps, step))
    return tuple(run.matrix.units[index] for index in np.flatnonzero(run.matrix.selected[row]))


def _cause(
    steps: tuple[ExplainedStep, ExplainedStep],
    units: tuple[ExplainedUnit, ExplainedUnit],
    *,
    settings: bool,
    norms: bool,
) -> Cause:
    one, other = units
    if one.outcome == other.outcome or not (settings or norms):
        return "record"  # worked out again, they decide alike
    if one.rank is not None and other.rank is not None:
        return "budget"
    if (one.score > 1) == (other.score > 1) and steps[0].is_warming_up == steps[1].is_warming_up:
        return "locks"
    if settings and norms:
        return "norms" if _same_rule(steps, units) else "settings"
    return "settings" if settings else "norms"


def _same_rule(
    steps: tuple[ExplainedStep, ExplainedStep], units: tuple[ExplainedUnit, ExplainedUnit]
) -> bool:
    """Whether under the settings of the first run the second's ratios would still have decided otherwise."""
    rule, other = steps[0], steps[1]
    keys = ("policy", "delta", "is_warming_up")
    if any(getattr(rule, key) != getattr(other, key) for key in keys):
        return False
    if rule.policy != "gnmr":
        return rule.alpha == other.alpha
    score = max(units[1].gnmr / rule.alpha, units[1].delta_gnmr / rule.beta)
    return (score > 1) == (units[1].score > 1)


def _why(
    cause: Cause,
    steps: tuple[ExplainedStep, ExplainedStep],
    units: tuple[ExplainedUnit, ExplainedUnit],
) -> str:
    one, other = units
    if cause == "record":
        return (
            "norms and settings give the same decision in both runs, so one is not as recorded; see `gnmr-megatron "
            "replay`"
        )
    if cause == "budget":
        places = [
            f"{unit.rank} of {len(step.candidates)} for {step.max_recovered}"
            for step, unit in zip(steps, units, strict=True)
        ]
        return f"a candidate in both runs, at place {places[0]} in the first, {places[1]} in the second"
    if cause == "locks":
        return f"its lock was {one.lock_before} in the first run, {other.lock_before} in the second"
    if steps[0].is_warming_up != steps[1].is_warming_up:
        return f"the {'first' if steps[0].is_warming_up else 'second'} run was warming up"
    limits = [f"alpha {step.alpha:.4g}, beta {step.beta:.4g}" for step in steps]
    values = [f"GNMR {unit.gnmr:.6g}, delta-GNMR {unit.delta_gnmr:.6g}" for unit in units]
    return (
        f"scored {one.score:.6g} in the first run ({values[0]}; {limits[0]}) and {other.score:.6g} in the second "
        f"({values[1]}; {limits[1]})"
    )
