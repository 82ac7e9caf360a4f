"""Thresholds for a wanted rate of exceedances, from the ratios of a trace.

Arrays are [steps, units] float64; an exceedance is a unit-step whose GNMR is above alpha or whose delta-GNMR is above
beta.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.statistics import BoolArray, FloatArray, GradNormHistory, IntArray

DIGITS = 5
"""Significant digits of thresholds; more where values lie closer."""


class Ratios(NamedTuple):
    """GNMR and delta-GNMR of some steps."""

    gnmr: FloatArray
    delta_gnmr: FloatArray

    def part(self, start: int, stop: int) -> Ratios:
        """Those of the rows from `start` up to `stop`."""
        return Ratios(self.gnmr[start:stop], self.delta_gnmr[start:stop])

    def is_risky(self, alpha: float, beta: float) -> BoolArray:
        """[steps, units] whether the score of policy `gnmr` is above 1."""
        risky: BoolArray = np.maximum(self.gnmr / alpha, self.delta_gnmr / beta) > 1
        return risky


def trace_ratios(norms: FloatArray, updated: BoolArray, config: ControlConfig) -> Ratios:
    """The ratios of all steps, the history beginning with the first of them."""
    history = GradNormHistory(
        norms.shape[1],
        delta=config.delta,
        mean=config.mean,
        ema_decay=config.ema_decay,
        window=config.window,
    )
    gnmr, delta_gnmr = np.empty_like(norms), np.empty_like(norms)
    with np.errstate(all="ignore"):
        for row, flag in enumerate(updated.tolist()):
            gnmr[row], delta_gnmr[row] = history.ratios(norms[row])
            if flag:
                history.fold(norms[row], gnmr[row])
    return Ratios(gnmr, delta_gnmr)


def balanced_thresholds(ratios: Ratios, rate: float) -> tuple[float, float]:
    """The lowest alpha and beta with at most this rate of exceedances, each passed by equally many unit-steps.

    The rate falls with alpha and with beta, so many pairs have the same one; the balanced pair lets neither a slow
    departure nor a sudden shock take all of it.

    Raises:
        ValueError: norms that are not finite are more than the rate already.
    """
    size = ratios.gnmr.size
    allowed = math.floor(rate * size)
    most = min(allowed + 1, size)
    tops = [_largest(values.ravel(), most) for values in ratios]
    place = np.full(size, most)  # the better one of a unit-step's places in the two lists
    for top in tops:
        place[top] = np.minimum(place[top], np.arange(most))
    passed = np.cumsum(np.bincount(place, minlength=most + 1)[:most])
    count = int(np.searchsorted(passed, allowed, side="right"))
    alpha, beta = (
        _between(values.ravel()[top], count) for values, top in zip(ratios, tops, strict=True)
    )
    return alpha, beta


def _largest(values: FloatArray, count: int) -> IntArray:
    """Indices of the largest values, in falling order."""
    found = np.argpartition(-values, count - 1)[:count]
    order: IntArray = found[np.argsort(-values[found], kind="stable")]
    return order


def _between(falling: FloatArray, count: int) -> float:
    """A short number that the first `count` are above, and no others."""
    below = float(falling[min(count, len(falling) - 1)])
    if math.isinf(below):
        raise ValueError("norms that are not finite are more than that")
    above = float(falling[count - 1]) if count else below
    middle = below if math.isinf(above) else (above + below) / 2
    for digits in range(DIGITS, 18):
        scale = 10.0 ** (digits - 1 - math.floor(math.log10(middle)))
        rounded = math.ceil(middle * scale) / scale
        if below <= rounded and (rounded < above or count == 0):
            return rounded
    return below
