"""SIGTERM, SIGUSR1 and SIGINT as a wish to stop after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interruption:
    """Notes that a signal asked to stop; used as a context manager around the loop.

    A second SIGINT interrupts at once, as a person at a terminal expects.

    Args:
        stop_seconds: time within which the run should have stopped.
        on_late: called, by a thread of its own, where it has not.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, stop_seconds: float, on_late: Callable[[], None]) -> None:
        self.signal_name: str | None = None
        self._timer = threading.Timer(stop_seconds, on_late)
        self._timer.daemon = True
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
        self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        if self.signal_name is None:
            self._timer.start()
        self.signal_name = signal.Signals(number).name
