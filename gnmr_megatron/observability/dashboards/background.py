"""A tracker on a thread of its own: for dashboards that may keep a caller waiting."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from gnmr_megatron.observability.events import Event

if TYPE_CHECKING:
    from gnmr_megatron.observability.trackers import Tracker


class BackgroundTracker:
    """Hands events over and returns at once; what the tracker raises comes with a later call.

    Args:
        tracker: used on the thread only.
        close_seconds: how long `close` waits for what is left.
        advice: what a user may do about it where that isn't long enough.
    """

    def __init__(self, tracker: Tracker, *, close_seconds: float, advice: str) -> None:
        self._tracker, self._close_seconds, self._advice = tracker, close_seconds, advice
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def record(self, event: Event) -> None:
        """Hand over an event.

        Raises:
            RuntimeError: names what the tracker raised for an earlier one.
        """
        self._raise_error()
        self._events.put(event)

    def close(self) -> None:
        """Wait until all is shown.

        Raises:
            RuntimeError: names what the tracker raised.
            TimeoutError: it takes too long; it is left behind.
        """
        self._events.put(None)
        self._thread.join(self._close_seconds)
        self._raise_error()
        if self._thread.is_alive():
            name = type(self._tracker).__name__
            raise TimeoutError(
                f"{name} isn't done {self._close_seconds:.0f} s after the end; {self._advice}"
            )

    def _work(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._tracker.record(event)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - it is raised again where it can be told
            self._error = error

    def _raise_error(self) -> None:
        if (error := self._error) is not None:
            what = f"{type(self._tracker).__name__} raised {type(error).__name__}: {error}"
            raise RuntimeError(what) from error
