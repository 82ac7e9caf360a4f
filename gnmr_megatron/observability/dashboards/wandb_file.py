"""Which steps W&B's own file of a run has; W&B has no reader for it.

The file is a log as LevelDB writes it, blocks of records behind a header of seven bytes; each record is a protocol
buffer.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
FILE_HEADER = 7
RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind
ENDS = (1, 4)  # kinds: a whole record, or the last part of one


def logged_steps(path: Path, key: str) -> tuple[int, list[int]]:
    """Steps of a .wandb file, also of one that a crash cut off.

    Returns:
        The highest, 0 where it has none; and those with a value of `key`.
    """
    last = 0
    with_key: list[int] = []
    for row in logged_rows(path):
        last = max(last, row.step.num)
        if any(key in (item.key, *item.nested_key) for item in row.item):
            with_key.append(row.step.num)
    return last, with_key


def logged_rows(path: Path) -> Iterator[Any]:
    """What was logged, in order: W&B's own messages, each with its step and items of key and JSON text."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it has no stubs
    from wandb.proto import wandb_internal_pb2

    if path.stat().st_size <= FILE_HEADER:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for content in _records(data):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made at run time
            try:
                record.ParseFromString(content)
            except DecodeError:
                return
            if record.WhichOneof("record_type") == "history":
                yield record.history


def _records(data: mmap.mmap) -> Iterator[bytes]:
    position, parts = FILE_HEADER, b""
    while position + RECORD_HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < RECORD_HEADER.size:  # too little for another header
            position += left
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size
        if kind == 0 or position + length > len(data):
            return
        parts += data[position : position + length]
        position += length
        if kind in ENDS:
            yield parts
            parts = b""
