"""Values that may change over steps: thresholds and budgets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

Schedule = float | Mapping[int, float]
"""A constant, or {step: value}: linear between the steps, constant outside them."""


def value_at(schedule: Schedule, step: int) -> float:
    """Value of a schedule at a step.

    Example:
        >>> value_at({0: 4.0, 100: 2.0}, 50)
        3.0
    """
    if not isinstance(schedule, Mapping):
        return float(schedule)
    steps = sorted(schedule)
    after = bisect_right(steps, step)
    if after == 0:
        return float(schedule[steps[0]])
    if after == len(steps):
        return float(schedule[steps[-1]])
    left, right = steps[after - 1], steps[after]
    # multiplied before it is divided, so that whole numbers stay whole: a budget of 15 is not 14.99…
    rise = (step - left) * (schedule[right] - schedule[left]) / (right - left)
    return float(schedule[left] + rise)
