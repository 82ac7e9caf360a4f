"""Values that may change over steps: thresholds and budgets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

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


def sum_before(budget: int | Mapping[int, int], step: int) -> int:
    """Units that a budget allowed in steps 0 to step - 1, each rounded down as `value_at` of it is.

    Example:
        >>> sum_before({0: 1, 2: 2}, 4)  # 1 + 1 + 2 + 2
        6
    """
    if not isinstance(budget, Mapping):
        return step * budget
    steps = np.array(sorted(budget))
    values = np.array([budget[at] for at in steps.tolist()], dtype=np.float64)
    seen = np.arange(step)
    after = np.searchsorted(steps, seen, side="right")
    left, right = np.maximum(after - 1, 0), np.minimum(after, len(steps) - 1)
    length = np.maximum(steps[right] - steps[left], 1)  # outside the steps, both are the same one
    rise = (seen - steps[left]) * (values[right] - values[left]) / length
    return int(np.floor(values[left] + rise).sum())
