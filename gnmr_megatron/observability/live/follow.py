"""Follow the events of a run that another process writes, from this machine or over a shared file system.

Nothing is asked of the run: its events.jsonl is looked at twice a second. (inotify does not see what other machines
write.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.event_log import FILE
from gnmr_megatron.observability.events import Event, FinishEvent, StartEvent, from_line

POLL_SECONDS = 0.5
TAIL_BYTES = 256 * 1024
"""At the end of a log that is met for the first time every event is read, before it only some of the steps."""
MOST_STEPS = 1000
STEP_BYTES = 400  # of a usual line
ANCHOR_BYTES = 256
STEP, DECISION = b'{"event": "step"', b'{"event": "decision"'


@dataclass(frozen=True)
class News:
    """Events since the last look; `is_anew` where they are those of a whole log that was there already, thinned out."""

    events: list[Event]
    is_anew: bool


class LogFollower:
    """Reads what is new in an events.jsonl.

    A resume may replace the file by one with fewer lines: then the last line that was read is no longer where it was,
    and all is read anew. Between two looks no file is open, so that network file systems show what is new.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._lines = 0
        self._anchor = b""
        self._has_looked = False

    def look(self) -> News | None:
        """What is new; None where there is no file yet.

        Raises:
            DataError: the file cannot be read, or a line is broken or of another version; names file and line.
        """
        try:
            with self._path.open("rb") as file:
                is_anew = not self._has_looked or not self._is_where_it_was(file)
                return News(self._all(file) if is_anew else self._rest(file), is_anew)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error}") from error
        finally:
            self._has_looked = True

    def _is_where_it_was(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._anchor))
        return file.read(len(self._anchor)) == self._anchor

    def _all(self, file: BinaryIO) -> list[Event]:
        size = file.seek(0, 2)
        file.seek(0)
        self._offset = self._lines = 0
        stride = max(1, size // (MOST_STEPS * STEP_BYTES))
        events, steps = [], 0
        for line in file:
            if not self._take(line):
                break
            if self._offset < size - TAIL_BYTES:
                steps += line.startswith(STEP)
                if line.startswith(DECISION) or (line.startswith(STEP) and steps % stride):
                    continue
            events.append(self._event(line))
        return events

    def _rest(self, file: BinaryIO) -> list[Event]:
        return [self._event(line) for line in file if self._take(line)]

    def _take(self, line: bytes) -> bool:
        """Move behind a line; one that is half written waits."""
        if not line.endswith(b"\n"):
            return False
        self._offset += len(line)
        self._lines += 1
        self._anchor = line[-ANCHOR_BYTES:]
        return True

    def _event(self, line: bytes) -> Event:
        try:
            return from_line(line)
        except ValueError as error:
            raise DataError(
                f"{self._path}:{self._lines}: is no event that this version knows: {error}"
            ) from error


class Watcher(Protocol):
    """Shows a run that is followed."""

    def load(self, events: Sequence[Event]) -> None:
        """Take in all that there is; also after a resume has rewritten the log."""

    def record(self, event: Event) -> None:
        """Show a new event."""

    def idle(self) -> None:
        """Nothing is new."""

    def close(self) -> None:
        """Show what is left."""


def follow(
    folder: Path,
    watcher: Watcher,
    *,
    tell: Callable[[str], None],
    poll_seconds: float = POLL_SECONDS,
) -> FinishEvent:
    """Show a run until it ends.

    Args:
        folder: run folder, which need not exist yet.
        watcher: who shows it.
        tell: called once where the run has not begun.
        poll_seconds: time between two looks.

    Returns:
        The event that ended it; a run that was killed is waited for, since it may be resumed.

    Raises:
        DataError: its log cannot be read.
    """
    follower, has_begun, finish = LogFollower(folder / FILE), False, None
    is_told = False
    while finish is None:
        news = follower.look()
        events = news.events if news else []
        for event in events:
            if isinstance(event, StartEvent):
                has_begun, finish = True, None
            elif isinstance(event, FinishEvent):
                finish = event
        if not has_begun and not is_told:
            is_told = True
            tell(f"{folder}: waits for the run to begin")
        _show(news, watcher)
        if finish is None:
            time.sleep(poll_seconds)
    return finish


def _show(news: News | None, watcher: Watcher) -> None:
    if news is None or not news.events:
        watcher.idle()
    elif news.is_anew:
        watcher.load(news.events)
    else:
        for event in news.events:
            watcher.record(event)
