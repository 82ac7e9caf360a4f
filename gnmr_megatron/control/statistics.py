"""GNMR and delta-GNMR as closed formulas over arrays, and the history they need.

Source: arXiv 2606.00539, definitions of GNMR and delta-GNMR.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


def gnmr(norms: FloatArray, mean: FloatArray) -> FloatArray:
    """Gradient norm over the mean of past norms: the long-term departure of each unit.

    Args:
        norms: [units] float64 gradient norms of this step, unscaled, before clipping.
        mean: [units] float64 mean of the past norms; 0 where there is no history.

    Returns:
        [units] float64, dimensionless: 1 where the mean is 0, inf where the norm is not finite.
    """
    ratio = np.divide(norms, mean, out=np.ones_like(norms), where=mean > 0)
    ratio[~np.isfinite(norms)] = np.inf
    return ratio


def delta_gnmr(current: FloatArray, recent_mean: FloatArray, is_full: BoolArray) -> FloatArray:
    """GNMR over the mean of its last delta values: the sudden shock of each unit.

    Args:
        current: [units] float64 GNMR of this step; inf marks a gradient that is not finite.
        recent_mean: [units] float64 mean of the last delta GNMR values.
        is_full: [units] bool, whether delta values exist.

    Returns:
        [units] float64: 1 until delta values exist; inf where GNMR is inf. Where the recent mean is 0 (a dead
        gradient comes back) inf if GNMR is positive, else 1.
    """
    positive = is_full & (recent_mean > 0)
    ratio = np.divide(current, recent_mean, out=np.ones_like(current), where=positive)
    ratio[is_full & (recent_mean == 0) & (current > 0)] = np.inf
    ratio[np.isinf(current)] = np.inf
    return ratio


class GradNormHistory:
    """What GNMR remembers of each unit: the mean of past norms and the last delta GNMR values.

    Sums run in float64 in the order of the steps, so that a reimplementation can match them bit for bit.
    """

    def __init__(
        self,
        num_units: int,
        *,
        delta: int,
        mean: Literal["cumulative", "ema", "window"] = "cumulative",
        ema_decay: float = 0.99,
        window: int = 128,
    ) -> None:
        self._mean_kind, self._ema_decay = mean, ema_decay
        self.count: IntArray = np.zeros(num_units, dtype=np.int64)
        """[units] norms folded in so far."""
        self._total: FloatArray = np.zeros(num_units)
        """[units] sum of norms; for `ema` the decayed sum of (1 - decay) * norm."""
        self._weight: FloatArray = np.zeros(num_units)
        """[units] what the total is divided by: the count, or for `ema` the decayed sum of (1 - decay)."""
        self._recent: FloatArray = np.zeros((delta, num_units))
        """[delta, units] last GNMR values, oldest first, filled from the end."""
        self._past: FloatArray = np.zeros((window if mean == "window" else 0, num_units))
        """[window, units] last norms, oldest first; only for `window`."""

    def mean(self) -> FloatArray:
        """[units] mean of the past norms; 0 where there is no history."""
        total, weight = self._total, self._weight
        if self._mean_kind == "window":
            total, weight = _sum_rows(self._past), np.minimum(weight, float(len(self._past)))
        mean: FloatArray = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
        return mean

    def recent_mean(self) -> FloatArray:
        """[units] mean of the last delta GNMR values; of no use where there are fewer yet."""
        return _sum_rows(self._recent) / len(self._recent)

    def ratios(self, norms: FloatArray) -> tuple[FloatArray, FloatArray]:
        """GNMR and delta-GNMR of this step's norms, [units] float64 each; changes nothing."""
        current = gnmr(norms, self.mean())
        is_full = self.count >= len(self._recent)
        return current, delta_gnmr(current, self.recent_mean(), is_full)

    def fold(self, norms: FloatArray, current: FloatArray) -> None:
        """Add a step's norms and GNMR values; a unit whose norm is not finite is left out."""
        finite = np.isfinite(norms)
        kept = np.where(finite, norms, 0.0)
        if self._mean_kind == "ema":
            # total / weight is the bias-corrected mean; no power of the decay, which differs between machines
            new = 1.0 - self._ema_decay
            self._total = np.where(finite, self._ema_decay * self._total + new * kept, self._total)
            self._weight = np.where(finite, self._ema_decay * self._weight + new, self._weight)
        else:
            self._total += kept
            self._weight += finite
        if self._mean_kind == "window":
            self._past = _shifted(self._past, norms, finite)
        self._recent = _shifted(self._recent, current, finite)
        self.count += finite

    def state_dict(self) -> dict[str, Any]:
        """Arrays whose last axis is the unit."""
        return {
            "count": self.count.copy(),
            "total": self._total.copy(),
            "weight": self._weight.copy(),
            "recent": self._recent.copy(),
            "past": self._past.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ValueError: delta or window differ from those of the saved history.
        """
        for name in ("recent", "past"):
            held, saved = getattr(self, f"_{name}"), np.asarray(state[name], dtype=np.float64)
            if held.shape != saved.shape:
                raise ValueError(
                    f"history `{name}` has shape {saved.shape}, the settings ask for {held.shape}"
                )
        self.count = np.array(state["count"], dtype=np.int64)
        self._total = np.array(state["total"], dtype=np.float64)
        self._weight = np.array(state["weight"], dtype=np.float64)
        self._recent = np.array(state["recent"], dtype=np.float64)
        self._past = np.array(state["past"], dtype=np.float64)


def _sum_rows(rows: FloatArray) -> FloatArray:
    """[units] sum over rows, one after the other; NumPy's own order would depend on the number of units."""
    total: FloatArray = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def _shifted(rows: FloatArray, newest: FloatArray, where: BoolArray) -> FloatArray:
    """Rows moved up by one with `newest` as the last, for the units in `where`."""
    moved = np.concatenate([rows[1:], newest[None]])
    return moved if where.all() else np.where(where, moved, rows)
