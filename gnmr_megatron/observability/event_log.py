"""The append-only events.jsonl of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.append_file import AppendFile
from gnmr_megatron.observability.events import Event, FinishEvent, from_line, to_line

FILE = "events.jsonl"
SUPERSEDED = "events.superseded.jsonl"


class EventLog:
    """Writes one whole line an event, at once.

    Args:
        folder: run folder.

    Attributes:
        broken_off_after: last step of the attempt before, where that ended without a finish; else None.
    """

    def __init__(self, folder: Path) -> None:
        self.broken_off_after: int | None = None
        self._file = AppendFile(folder / FILE)

    @classmethod
    def resume(cls, folder: Path, step: int) -> EventLog:
        """Go on after `step`.

        Lines of later steps, which a crashed run had taken after its last checkpoint, move to
        events.superseded.jsonl, so that the log has each step once; so does what a crash left of a last line.
        Where this is interrupted, events.jsonl is as before; lines may then be superseded twice, but none is lost.

        Raises:
            DataError: a line among those to be kept is broken; names file and line.
        """
        path, last = folder / FILE, None
        if path.exists():
            temporary = path.with_name(FILE + ".tmp")
            with (
                path.open("rb") as lines,
                temporary.open("wb") as kept,
                (folder / SUPERSEDED).open("ab") as dead,
            ):
                last = _sort(lines, step, kept=kept, dead=dead)
                has_dead = lines.tell() != kept.tell()
                for file in (dead, kept):  # on the disk before the old file goes
                    file.flush()
                    os.fsync(file.fileno())
            if has_dead:
                temporary.replace(path)
            else:
                temporary.unlink()
            if (folder / SUPERSEDED).stat().st_size == 0:
                (folder / SUPERSEDED).unlink()
        log = cls(folder)
        if last is not None and not isinstance(last, FinishEvent):
            log.broken_off_after = last.step
        return log

    def append(self, event: Event) -> None:
        """Write an event; it is with the operating system when this returns."""
        self._file.append(to_line(event).encode())

    def close(self) -> None:
        """Bring all lines to the disk and close the file."""
        self._file.close()


def _sort(lines: BinaryIO, step: int, *, kept: BinaryIO, dead: BinaryIO) -> Event | None:
    """Copy each line to `kept` or to `dead`; a broken one may stand only behind those that are kept.

    Returns:
        The last event that is whole.
    """
    broken, last = "", None
    for number, line in enumerate(lines, start=1):
        try:
            is_kept = False
            if line.endswith(b"\n"):
                last = from_line(line)
                is_kept = _belongs(last, step)
        except ValueError as error:
            is_kept, broken = False, broken or f"{lines.name}:{number}: {error}"
        if is_kept and broken:
            raise DataError(f"{broken}; mend or remove this line before you resume")
        (kept if is_kept else dead).write(line)
        if not line.endswith(b"\n"):
            dead.write(b"\n")
    return last


def _belongs(event: Event, step: int) -> bool:
    """Whether an event is of a step that the run keeps; a start names the step that it is about to take."""
    return event.step <= (step + 1 if event.name == "start" else step)
