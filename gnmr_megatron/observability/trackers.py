"""Trackers: each shows the events of a run somewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from gnmr_megatron.observability.events import Event


class Tracker(Protocol):
    """Shows events."""

    def record(self, event: Event) -> None:
        """Show an event, or pass over it."""

    def close(self) -> None:
        """Show what is left."""


class TrackerGroup:
    """Several trackers as one. A tracker that fails is dropped with one line on standard error; training goes on."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def record(self, event: Event) -> None:
        """Hand the event to every tracker that still works."""
        for tracker in tuple(self._trackers):
            try:
                tracker.record(event)
            except Exception as error:  # noqa: BLE001 - whatever a dashboard does must not stop training
                self._drop(tracker, error)

    def close(self) -> None:
        """Close every tracker that still works."""
        for tracker in tuple(self._trackers):
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._drop(tracker, error)

    def _drop(self, tracker: Tracker, error: Exception) -> None:
        self._trackers.remove(tracker)
        sys.stderr.write(
            f"{type(tracker).__name__} failed and is off from here on ({type(error).__name__}: {error}); "
            "training goes on, and the run folder has everything\n"
        )
