"""Reads the records of an offline W&B file: LevelDB's log format around protocol buffers, after a 7-byte header."""

import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK = 32768
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path):
    """Every record of a .wandb file, in order."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", "is no W&B file"
    position, parts = HEADER, []
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # a block's tail that holds no header is padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        position += HEADER
        parts.append(data[position : position + length])
        position += length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def history(path: Path):
    """Logged values by step: {step: {key: JSON text}}."""
    rows = {}
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            rows.setdefault(int(items["_step"]), {}).update(items)
    return rows
