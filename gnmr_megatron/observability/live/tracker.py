"""The live view as a tracker: of the process that trains, and of one that only watches."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from gnmr_megatron.observability.console import lines_of
from gnmr_megatron.observability.events import Event, FaultEvent, StepEvent
from gnmr_megatron.observability.live.progress import RunProgress
from gnmr_megatron.observability.live.region import RELEASE, BottomRegion
from gnmr_megatron.observability.live.unit_risks import UnitRisks
from gnmr_megatron.observability.live.view import RISKIEST, Snapshot, render

REDRAW_SECONDS = 0.5
CLOSE_SECONDS = 2.0  # a terminal that is stopped (Ctrl-S) must not hold the end of training
LEAST_COLUMNS, LEAST_ROWS = 40, 6
# after these faults the process ends at once, without a close
LAST_WORDS = ("hang", "stopped_late")


def can_draw(file: TextIO) -> bool:
    """Whether `file` is a terminal that someone looks at, and that can move its cursor."""
    try:
        size = os.get_terminal_size(file.fileno())
    except (OSError, ValueError):
        return False
    return (
        file.isatty()
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        and "JPY_PARENT_PID"
        not in os.environ  # notebooks run commands in a terminal that can only print
        and file.encoding.lower().replace("-", "") == "utf8"
        and size.columns >= LEAST_COLUMNS
        and size.lines >= LEAST_ROWS
        and is_foreground(file.fileno())
    )


def is_foreground(descriptor: int) -> bool:
    """Whether the terminal is ours to draw on: not that of a job that the shell runs in the background."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not our controlling terminal: a rank that `train` has started
        return True


def release_terminal(file: TextIO) -> None:
    """Take back what a process that was killed has left of its view; does no harm where there was none."""
    if can_draw(file):
        file.flush()
        with contextlib.suppress(OSError):
            os.write(file.fileno(), RELEASE.encode())


class LiveTracker:
    """Redraws a few rows at the bottom of the terminal; other events than steps are lines above them, too.

    A thread of its own draws, at most twice a second and only what changed; `record` never waits for the terminal.

    Args:
        folder: run folder, for the end of its risk matrix.
        file: a terminal, see `can_draw`; standard output by default.
        clock: seconds since 1970.

    Attributes:
        failure: what the drawing thread has met; the view is off then.
    """

    def __init__(
        self, folder: Path, *, file: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file or sys.stdout
        self._region = BottomRegion(self._file.fileno())
        self._console = Console(file=self._file, force_terminal=True, force_jupyter=False)
        self._risks = UnitRisks(folder)
        self._clock = clock
        self._lock = threading.Lock()
        self._progress = RunProgress()
        self._above: list[Text] = []
        self._drawn: object = None
        self.failure: Exception | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def record(self, event: Event) -> None:
        """Take in an event.

        Raises:
            Exception: what the drawing thread has met; the view is off.
        """
        if self.failure is not None:
            raise self.failure
        with self._lock:
            self._progress.add(event)
            if not isinstance(event, StepEvent):
                self._above += lines_of(event, self._progress)
        if isinstance(event, FaultEvent) and event.kind in LAST_WORDS:
            self.close()
        elif self._thread is None:
            self._begin()

    def load(self, events: Iterable[Event]) -> None:
        """Begin anew with events that have been shown, or that nobody asks for one by one."""
        progress = RunProgress()
        for event in events:
            progress.add(event)
        with self._lock:
            self._progress = progress
        if self._thread is None:
            self._begin()

    def close(self) -> None:
        """Leave the last view on the screen as lines; a second call does nothing."""
        if self._thread is None or self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.close)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive() and self.failure is None:
            size = self._region.size()
            above, view = self._take(size.columns - 1, sys.maxsize)
            self._region.release("".join(f"{row}\n" for row in [*above, "", *view]))

    def _begin(self) -> None:
        self._file.flush()
        self._thread = threading.Thread(target=self._run, name="live view", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        try:
            self._draw()
            while not self._ended.wait(REDRAW_SECONDS):
                self._draw()
        except Exception as error:  # noqa: BLE001 - goes to whoever records the next event
            self.failure = error
            with contextlib.suppress(OSError):
                self._region.release()

    def _draw(self) -> None:
        size = self._region.size()
        if size.lines < LEAST_ROWS or not is_foreground(self._file.fileno()):
            self._region.release()
            self._drawn = None
            return
        above, view = self._take(size.columns - 1, _height(size.lines))
        if above or (size, view) != self._drawn:
            self._region.draw(view, size=size, above="".join(f"{line}\n" for line in above))
            self._drawn = (size, view)

    def _take(self, width: int, height: int) -> tuple[list[str], list[str]]:
        """What is to be printed above, once, and the view; in escape codes of this terminal."""
        risks = self._risks.riskiest(self._progress, RISKIEST)
        with self._lock:
            above, self._above = self._above, []
            view = render(
                Snapshot(progress=self._progress, risks=risks, now=self._clock()),
                width=width,
                height=height,
            )
        return self._encode(above), self._encode(view)

    def _encode(self, lines: Sequence[Text]) -> list[str]:
        if not lines:
            return []
        with self._console.capture() as capture:
            for line in lines:
                self._console.print(line, soft_wrap=True, highlight=False)
        return capture.get().split("\n")[:-1]


def _height(rows: int) -> int:
    """Rows for the view: some stay for what scrolls."""
    return rows - max(2, min(5, rows // 4))
