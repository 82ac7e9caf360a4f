"""A curve of any length in bounded memory, and as a row of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
MOST_POINTS = 1024


class CurveHistory:
    """Values over steps; when there are too many, neighbours are merged into their mean."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._merged = 1  # values in a whole point
        self._open: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Append the value of a later step."""
        self._open.append(value)
        if len(self._open) == self._merged:
            self._points.append((step, _mean(self._open)))
            self._open = []
        if len(self._points) == MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(last, _mean([a, b])) for (_, a), (last, b) in pairs]
            self._merged *= 2

    def columns(self, width: int) -> list[float]:
        """At most `width` means, each of as many steps as the others."""
        points = [*self._points, *((math.inf, value) for value in self._open)]
        if len(points) <= width:
            return [value for _, value in points]
        first = points[0][0]
        last = self._points[-1][0] if self._points else first
        buckets: list[list[float]] = [[] for _ in range(width)]
        for step, value in points:
            place = (min(step, last) - first) / max(last - first, 1)
            buckets[min(int(place * width), width - 1)].append(value)
        return [_mean(bucket) for bucket in buckets if bucket]


def sparkline(values: Sequence[float]) -> str:
    """One block a value, from the lowest to the highest; a cross where it is not finite.

    Example:
        >>> sparkline([1.0, 4.0, 8.0])
        '▁▄█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return NOT_FINITE * len(values)
    low, height = min(finite), max(finite) - min(finite)
    return "".join(_block((value - low) / height if height else 0.0) for value in values)


def _block(place: float) -> str:
    if not math.isfinite(place):
        return NOT_FINITE
    return BLOCKS[round(place * (len(BLOCKS) - 1))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
