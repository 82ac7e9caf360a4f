"""Losses that stand out."""

from __future__ import annotations

import math
from collections import deque


class SpikeDetector:
    """Finds values far above those before them.

    Args:
        window: values that a new one is compared with.
        deviations: standard deviations above their mean that make a spike.
        least: values to have seen before the first judgement.
    """

    def __init__(self, *, window: int = 128, deviations: float = 6.0, least: int = 16) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._deviations, self._least = deviations, least

    def threshold(self) -> float:
        """Above which a value is a spike; infinite as long as too few were seen."""
        if len(self._values) < self._least:
            return math.inf
        mean = math.fsum(self._values) / len(self._values)
        # not statistics.pstdev, which is exact and takes a tenth of a millisecond
        variance = math.fsum((value - mean) ** 2 for value in self._values) / len(self._values)
        return mean + self._deviations * math.sqrt(variance)

    def add(self, value: float) -> bool:
        """Take in the next value; tells whether it is a spike. One that is not finite is none, and left out."""
        if not math.isfinite(value):
            return False
        is_spike = value > self.threshold()
        self._values.append(value)
        return is_spike
