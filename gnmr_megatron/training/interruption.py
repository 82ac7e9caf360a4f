"""SIGTERM and SIGINT as a wish to stop after the current step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interruption:
    """Notes that a signal asked to stop; used as a context manager around the loop.

    A second SIGINT interrupts at once, as a person at a terminal expects.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal_name is not None

    def __enter__(self) -> Interruption:
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
