"""How many units hold a lock, told by the decisions."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from gnmr_megatron.analysis.report.history import Selections
from gnmr_megatron.control.statistics import IntArray


def lock_occupancy(
    selections: Selections, steps: IntArray, *, restarts: Collection[int] = ()
) -> IntArray:
    """For each step the number of units whose lock is above 0 after its decision.

    A decision tells the locks of the units that it selects. A lock that another unit holds falls by one a step, whether
    or not the unit is selected, so that a lock of n told at step s stands until step s + n - 1, unless a later decision
    tells another.

    Args:
        selections: of a whole run, in the order of the steps.
        steps: [steps] steps of the run, ascending.
        restarts: first steps of a controller that began anew, without locks.

    Returns:
        [steps] int64.
    """
    if not len(steps):
        return np.zeros(0, dtype=np.int64)
    first, last = int(steps[0]), int(steps[-1])
    change = np.zeros(last - first + 2, dtype=np.int64)
    bounds = sorted(restarts)
    until: dict[int, int] = {}  # the step in which a unit's lock is 0 again
    for step, unit, lock in zip(
        selections.step.tolist(), selections.unit.tolist(), selections.lock.tolist(), strict=True
    ):
        if not first <= step <= last:
            continue
        end = min([step + lock, last + 1, *(bound for bound in bounds if bound > step)])
        before = until.get(unit, step)
        if before > step:  # this decision replaces what an earlier one told
            change[step - first] -= 1
            change[before - first] += 1
        change[step - first] += 1
        change[end - first] -= 1
        until[unit] = end
    return np.cumsum(change)[:-1][steps - first]
