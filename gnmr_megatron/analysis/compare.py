"""Where two recorded runs part, and why.

Norms of two runs may be equal to the bit, differ by rounding (as between layouts), or truly differ; the first two say
that the runs computed the same. Decisions are compared apart, since a difference of the last bit can tip one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnmr_megatron.analysis.causes import DecisionDifference, decision_difference
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.events import strict_json

ROUNDING = 1e-6
"""Largest relative difference of two norms that counts as rounding."""

Norms = Literal["equal", "rounding", "different"]


@dataclass(frozen=True, kw_only=True)
class SettingsDifference:
    """The first step in which the controllers had other settings; `keys` gives both values of each."""

    step: int
    keys: dict[str, tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class NormDifference:
    """The first step with another norm, and there the unit with the largest relative difference."""

    step: int
    unit: str
    norms: tuple[float, float]
    relative: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs have in common.

    Attributes:
        steps: number of steps with norms in either run.
        common_steps: those that both have.
        norms: how the norms of the common steps compare.
        first_difference: first common step with another norm (by a bit), updated flag, recovery set or decision;
            None where there is none.
        settings: None where they were the same in all common steps.
        first_bit: first norm that is not equal to the bit.
        first_real: first norm that differs by more than rounding.
        recovered: first step in which other units were on the recovery path.
        updated: first step that one run took and the other skipped.
        decision: first decision that differs.
    """

    steps: tuple[int, int]
    common_steps: int
    norms: Norms
    first_difference: int | None
    settings: SettingsDifference | None
    first_bit: NormDifference | None
    first_real: NormDifference | None
    recovered: int | None
    updated: int | None
    decision: DecisionDifference | None

    @property
    def equal(self) -> bool:
        """Whether both runs have the same steps with the same settings, norms to the bit, and decisions."""
        return (
            self.first_difference is None
            and self.settings is None
            and self.steps == (self.common_steps, self.common_steps)
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        values: dict[str, Any] = strict_json({"equal": self.equal, **dataclasses.asdict(self)})
        return values


def compare(left: RecordedRun, right: RecordedRun) -> Comparison:
    """Compare two runs step by step.

    Raises:
        DataError: they are of other units, or have no step in common.
    """
    _check_units(left, right)
    first, second = left.matrix, right.matrix
    common, rows, other_rows = np.intersect1d(first.steps, second.steps, return_indices=True)
    if not len(common):
        raise DataError(f"{left.folder} and {right.folder} have no step with norms in common")
    norms = np.array(first.norms[rows]), np.array(second.norms[other_rows])
    is_other = (norms[0] != norms[1]) & ~(np.isnan(norms[0]) & np.isnan(norms[1]))
    relative = _relative(*norms, is_other)
    flags = {
        name: _first(getattr(first, name)[rows] != getattr(second, name)[other_rows], common)
        for name in ("recovered", "updated", "selected")
    }
    first_bit = _norm_difference(left, common, norms, relative, is_other)
    first_real = _norm_difference(left, common, norms, relative, relative > ROUNDING)
    settings = _settings_difference(left, right, common)
    starts = [step for step in flags.values() if step is not None]
    starts += [first_bit.step] if first_bit else []
    return Comparison(
        steps=(len(first.steps), len(second.steps)),
        common_steps=len(common),
        norms="different" if first_real else "rounding" if first_bit else "equal",
        first_difference=min(starts, default=None),
        settings=settings,
        first_bit=first_bit,
        first_real=first_real,
        recovered=flags["recovered"],
        updated=flags["updated"],
        decision=None
        if flags["selected"] is None
        else decision_difference(
            left,
            right,
            flags["selected"],
            settings_differ=settings is not None and settings.step <= flags["selected"],
            norms_differ=first_bit is not None and first_bit.step <= flags["selected"],
        ),
    )


def _check_units(left: RecordedRun, right: RecordedRun) -> None:
    for column, (unit, other) in enumerate(
        zip(left.matrix.units, right.matrix.units, strict=False)
    ):
        if unit != other:
            raise DataError(
                f"{left.folder} and {right.folder} are of other units: number {column} is {unit} in the first, {other} "
                "in the second"
            )
    counts = len(left.matrix.units), len(right.matrix.units)
    if counts[0] != counts[1]:
        longer = max(left, right, key=lambda run: len(run.matrix.units))
        raise DataError(
            f"{left.folder} and {right.folder} are of other units: {counts[0]} and {counts[1]}; only {longer.folder} "
            f"has {longer.matrix.units[min(counts)]}"
        )


def _relative(
    one: NDArray[np.float64], other: NDArray[np.float64], is_other: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """|a - b| over the larger one; inf where only one is finite, 0 where they are equal."""
    with np.errstate(all="ignore"):
        relative = np.abs(one - other) / np.maximum(np.abs(one), np.abs(other))
    relative[~(np.isfinite(one) & np.isfinite(other))] = np.inf
    relative[~is_other] = 0.0
    return relative


def _first(is_other: NDArray[np.bool_], steps: NDArray[np.int64]) -> int | None:
    rows = np.flatnonzero(is_other.reshape(len(steps), -1).any(axis=1))
    return int(steps[rows[0]]) if len(rows) else None


def _norm_difference(
    run: RecordedRun,
    steps: NDArray[np.int64],
    norms: tuple[NDArray[np.float64], NDArray[np.float64]],
    relative: NDArray[np.float64],
    is_other: NDArray[np.bool_],
) -> NormDifference | None:
    step = _first(is_other, steps)
    if step is None:
        return None
    row = int(np.searchsorted(steps, step))
    unit = int(relative[row].argmax())
    return NormDifference(
        step=step,
        unit=run.matrix.units[unit],
        norms=(float(norms[0][row, unit]), float(norms[1][row, unit])),
        relative=float(relative[row, unit]),
    )


def _settings_difference(
    left: RecordedRun, right: RecordedRun, steps: NDArray[np.int64]
) -> SettingsDifference | None:
    """Settings change only where an attempt begins, so only there they are looked at."""
    begins = {segment.first_step for run in (left, right) for segment in run.segments}
    for step in sorted({int(steps[0])} | {step for step in begins if step in steps}):
        one, other = _settings(left, step), _settings(right, step)
        keys = {
            f"gnmr.{key}": (value, other[key])
            for key, value in one.items()
            if value != other[key] and key != "check_interval"  # it decides nothing
        }
        if keys:
            return SettingsDifference(step=step, keys=keys)
    return None


def _settings(run: RecordedRun, step: int) -> dict[str, Any]:
    config: ControlConfig = next(
        segment.config for segment in reversed(run.segments) if segment.first_step <= step
    )
    return dataclasses.asdict(config)
