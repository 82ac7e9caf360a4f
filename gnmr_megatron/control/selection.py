"""The hard budget: at most so many units, the riskiest first."""

from __future__ import annotations

import numpy as np

from gnmr_megatron.control.statistics import BoolArray, FloatArray, IntArray


def select_recovery_set(score: FloatArray, candidate: BoolArray, max_recovered: int) -> IntArray:
    """Indices of the candidates with the highest scores.

    Args:
        score: [units] float64, higher is riskier; inf allowed, NaN not.
        candidate: [units] bool.
        max_recovered: budget maxO; the result is never longer.

    Returns:
        [at most max_recovered] int64, riskiest first; equal scores in the order of the unit table.
    """
    indices = np.flatnonzero(candidate)
    order = np.argsort(-score[indices], kind="stable")
    return indices[order[:max_recovered]].astype(np.int64)
