"""The lowest rows of a terminal, kept apart from all that scrolls above them.

rich's Live moves the cursor up over its last frame, so a line that another process prints (another rank, a C library)
shifts the frame and is lost under the next one. Here the terminal itself keeps the rows apart (its scrolling region,
VT100's DECSTBM): whoever prints, prints above, and nothing is lost. The cursor is never hidden.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"
WHOLE_SCREEN = "\x1b[r"
ERASE_BELOW = "\x1b[J"
ERASE_REST = "\x1b[K"
RELEASE = SAVE_CURSOR + WHOLE_SCREEN + RESTORE_CURSOR + ERASE_BELOW


class BottomRegion:
    """Rows at the bottom of a terminal.

    Important:
        `release` at the end, whatever happens: the terminal would go on to scroll in its upper part only.

    Args:
        descriptor: file descriptor of the terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size: os.terminal_size | None = None
        self._height = 0

    def size(self) -> os.terminal_size:
        """Columns and rows of the terminal now."""
        return os.get_terminal_size(self._descriptor)

    def draw(self, rows: Sequence[str], *, size: os.terminal_size, above: str = "") -> None:
        """Show rows in place of those before.

        Args:
            rows: each narrower than the terminal; fewer than it has.
            size: of the terminal, as the rows were made for it.
            above: whole lines to print above the rows first; they scroll.
        """
        frame = self._open(size, len(rows)) + above
        # one write: the terminal takes it whole, whatever other processes print meanwhile
        frame += SAVE_CURSOR
        for line, row in enumerate(rows, start=size.lines - len(rows) + 1):
            frame += f"\x1b[{line};1H{row}\x1b[0m{ERASE_REST}"
        self._write(frame + RESTORE_CURSOR)

    def release(self, last: str = "") -> None:
        """Give the rows back, empty, and print whole lines where the cursor is."""
        if self._height:
            self._size, self._height = None, 0
            self._write(RELEASE + last)

    def _open(self, size: os.terminal_size, height: int) -> str:
        if (size, height) == (self._size, self._height):
            return ""
        again = RELEASE if self._height else ""
        self._size, self._height = size, height
        room = "\n" * height + f"\x1b[{height}A"  # what stands there scrolls up
        region = f"\x1b[1;{size.lines - height}r"  # moves the cursor, too
        return again + room + SAVE_CURSOR + region + RESTORE_CURSOR

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
