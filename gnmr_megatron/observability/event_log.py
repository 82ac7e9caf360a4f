"""The append-only events.jsonl of a run."""

from __future__ import annotations

import os
from pathlib import Path

from gnmr_megatron.observability.events import Event, from_line, to_line

FILE = "events.jsonl"
SUPERSEDED = "events.superseded.jsonl"


class EventLog:
    """Writes one whole line an event, at once.

    Args:
        folder: run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / FILE).open("a", encoding="utf-8")

    @classmethod
    def resume(cls, folder: Path, step: int) -> EventLog:
        """Go on after `step`.

        Lines of later steps, which a crashed run had taken after its last checkpoint, move to
        events.superseded.jsonl, so that the log has each step once; so does a half-written last line.
        """
        path = folder / FILE
        kept: list[str] = []
        dead: list[str] = []
        for line in (
            path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        ):
            (kept if _belongs(line, step) else dead).append(line)
        if dead:
            with (folder / SUPERSEDED).open("a", encoding="utf-8") as superseded:
                superseded.writelines(line if line.endswith("\n") else line + "\n" for line in dead)
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(path)
        return cls(folder)

    def append(self, event: Event) -> None:
        """Write an event; it is with the operating system when this returns."""
        self._file.write(to_line(event))
        self._file.flush()

    def close(self) -> None:
        """Bring all lines to the disk and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def _belongs(line: str, step: int) -> bool:
    """Whether a line is whole and of a step that the run keeps."""
    try:
        event = from_line(line)
    except ValueError:
        return False
    first_kept_out = (
        step + 1 if event.name != "start" else step + 2
    )  # a start names the step it will take
    return line.endswith("\n") and event.step < first_kept_out
