"""What a calibration has found, and how it did."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

SATURATED = 0.05
"""Share of steps with more candidates than the budget from which on the budget is too small."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the settings come to in a part of the trace.

    Attributes:
        first_step: of the part.
        last_step: of the part.
        exceedance_rate: of its unit-steps.
        expected: number of exceedances at the wanted rate.
        exceedances: their number.
        recovered_rate: unit-steps on the recovery path, or that would be.
        saturated: share of steps with more candidates than the budget.
    """

    first_step: int
    last_step: int
    exceedance_rate: float
    expected: float
    exceedances: int
    recovered_rate: float
    saturated: float

    @property
    def is_met(self) -> bool:
        """Whether the rate is within a factor of two, and two standard deviations of such a count, of the wanted."""
        low, high = self.expected / 2, 2 * self.expected
        return low - 2 * math.sqrt(low) <= self.exceedances <= high + 2 * math.sqrt(high)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Thresholds for a rate, and what they come to."""

    target: float
    alpha: float
    beta: float
    fit: Part
    held_out: Part


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibrated settings, how they do, and what to beware of.

    Attributes:
        run: run folder.
        settings: those of `gnmr` that were chosen, and those of its mean where they are not the defaults.
        chosen: the thresholds, fitted and checked.
        curve: the same for lower and higher rates.
        by_gnmr: share of the fit's exceedances that pass alpha.
        by_delta_gnmr: share that pass beta; both shares count those that pass both.
        warnings: in words.
    """

    run: str
    settings: dict[str, Any]
    chosen: Point
    curve: tuple[Point, ...]
    by_gnmr: float
    by_delta_gnmr: float
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)
