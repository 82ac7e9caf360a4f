"""A file that grows by whole records, or not at all."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path


class AppendFile:
    """Appends records without a buffer, so that each one survives the death of the process.

    A record that doesn't fit on the disk is taken back: a half one would shift every record after it. It waits in
    memory, with those after it, until the disk takes them.

    Args:
        path: file, made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque()

    def append(self, record: bytes) -> None:
        """Write a record, behind those that wait.

        Raises:
            OSError: the file cannot take it now; it is tried again by the next call.
        """
        self._waiting.append(record)
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._write(self._waiting[0])
            self._waiting.popleft()

    def _write(self, record: bytes) -> None:
        end = os.fstat(self._file.fileno()).st_size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Bring everything to the disk and close the file; a second call does nothing.

        Raises:
            OSError: records still wait, and the disk does not take them; they are lost.
        """
        if not self._file.closed:
            try:
                self._write_waiting()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file so that a reader, or a crash, meets the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
