"""A curve of any length in bounded memory, and as a row of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
MOST_POINTS = 1024


class CurveHistory:
    """Values over steps; when there are too many, neighbours are merged into their mean.

    A point stands for the steps since the point before it, so steps may be left out.
    """

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._merged = 1  # values in a whole point
        self._open: list[_Point] = []
        self._step = 0

    def add(self, step: int, value: float) -> None:
        """Append the value of a later step."""
        steps = step - self._step if self._step else 1
        self._step = step
        self._open.append(_Point(step, max(steps, 1), value))
        if len(self._open) == self._merged:
            self._points.append(_merge(self._open))
            self._open = []
        if len(self._points) == MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_merge(pair) for pair in pairs]
            self._merged *= 2

    def columns(self, width: int) -> list[float]:
        """At most `width` means, each over as many steps as the others."""
        points = self._points + ([_merge(self._open)] if self._open else [])
        if len(points) <= width:
            return [point.value for point in points]
        before = points[0].step - points[0].steps
        buckets: list[list[_Point]] = [[] for _ in range(width)]
        for point in points:
            place = (point.step - before - point.steps / 2) / (points[-1].step - before)
            buckets[min(max(int(place * width), 0), width - 1)].append(point)
        return [_merge(bucket).value for bucket in buckets if bucket]


@dataclass(frozen=True)
class _Point:
    step: int  # the last of `steps`
    steps: int
    value: float


def _merge(points: Sequence[_Point]) -> _Point:
    steps = sum(point.steps for point in points)
    total = sum(point.steps * point.value for point in points)
    return _Point(points[-1].step, steps, total / steps if math.isfinite(total) else math.nan)


def sparkline(values: Sequence[float]) -> str:
    """One block a value, from the lowest to the highest; a cross where it is not finite.

    Example:
        >>> sparkline([1.0, 4.0, 8.0])
        '▁▄█'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, low, high) for value in values)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return NOT_FINITE
    place = (value - low) / (high - low) if high > low else 0.0
    return BLOCKS[round(place * (len(BLOCKS) - 1))]
