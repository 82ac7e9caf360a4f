"""Watchers without a terminal: plain lines, and JSON lines."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.text import Text

from gnmr_megatron.observability.console import ConsoleTracker, JsonTracker, duration
from gnmr_megatron.observability.events import Event
from gnmr_megatron.observability.live.progress import RunProgress
from gnmr_megatron.observability.live.tracker import LiveTracker

FIRST_LINES = 10


class LiveWatcher(LiveTracker):
    """The live view of a run that another process trains."""

    def idle(self) -> None:
        """Nothing: the view tells by itself how long no step has come.

        Raises:
            Exception: what the drawing thread has met.
        """
        if self.failure is not None:
            raise self.failure


class _Newest:
    """The time of the newest event that was shown: of a log that was rewritten, only what came later is new."""

    def __init__(self) -> None:
        self._time = -math.inf

    def is_new(self, event: Event) -> bool:
        """Whether the event came later."""
        return event.time > self._time

    def note(self, event: Event) -> None:
        """The event was shown."""
        self._time = max(self._time, event.time)


class LinesWatcher:
    """The lines of the plain console: the last few of what was there, then those that come.

    Args:
        file: where to print; standard output by default.
        clock: seconds since 1970.
    """

    def __init__(
        self, *, file: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._console = ConsoleTracker(file=file)
        self._progress = RunProgress()
        self._newest = _Newest()
        self._clock = clock
        self._told_silent = 0.0

    def load(self, events: Sequence[Event]) -> None:
        """Print the last lines of what has not been printed."""
        self._progress = RunProgress()
        lines: deque[Text] = deque(maxlen=FIRST_LINES)
        for event in events:
            self._progress.add(event)
            printed = self._console.lines_of(event)
            if self._newest.is_new(event):
                lines.extend(printed)
        for event in events:
            self._newest.note(event)
        self._console.print(lines)

    def record(self, event: Event) -> None:
        """Print the event's line."""
        self._newest.note(event)
        self._progress.add(event)
        self._console.record(event)
        self._told_silent = 0.0

    def idle(self) -> None:
        """Say that no step has come for long; again whenever that time has doubled."""
        silent = self._progress.silent_seconds(self._clock())
        if silent is not None and silent >= 2 * self._told_silent:
            self._told_silent = silent
            self._console.say("waiting", f"no step for {duration(silent)}")

    def close(self) -> None:
        """Nothing is held back."""


class JsonWatcher:
    """Each event that comes, as its line of events.jsonl; what was there before can be read there.

    Args:
        file: where to print; standard output by default.
    """

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._tracker = JsonTracker(file=file)
        self._newest = _Newest()
        self._has_begun = False

    def load(self, events: Sequence[Event]) -> None:
        """Print what a resume has added; nothing at first."""
        new = [event for event in events if self._has_begun and self._newest.is_new(event)]
        for event in new:
            self._tracker.record(event)
        for event in events:
            self._newest.note(event)
        self._has_begun = True

    def record(self, event: Event) -> None:
        """Print the event."""
        self._has_begun = True
        self._newest.note(event)
        self._tracker.record(event)

    def idle(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is held back."""
