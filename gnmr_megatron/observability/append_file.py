"""A file that grows by whole records, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


class AppendFile:
    """Appends records without a buffer, so that each one survives the death of the process.

    A record that doesn't fit on the disk is taken back before the error goes up: a half one would shift every record
    after it.

    Args:
        path: file, made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Write a record.

        Raises:
            OSError: the file cannot take it; the file is as before.
        """
        end = os.fstat(self._file.fileno()).st_size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Bring everything to the disk and close the file; a second call does nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file so that a reader, or a crash, meets the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
