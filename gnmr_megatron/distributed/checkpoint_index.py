"""The files around a checkpoint's tensors: its index, which is a pickle, and what megatron-core looks for.

Without megatron-core, so that checkpoints can be read and written by tools that build no model.
"""

from __future__ import annotations

import json
import os
import pickle  # only in _MetadataReader, which refuses all but the classes of .metadata
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from gnmr_megatron.errors import CheckpointError

BACKEND, VERSION = "torch_dist", 1
METADATA = ".metadata"
COMMON = "common.pt"
ENGINE_CONFIG = "metadata.json"


def write_engine_files(folder: Path) -> list[str]:
    """Write what the engine looks for beside the index, and bring all three to the disk; returns their names."""
    kinds = {
        "sharded_backend": BACKEND,
        "sharded_backend_version": VERSION,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / ENGINE_CONFIG).write_text(json.dumps(kinds))
    torch.save({}, folder / COMMON)
    names = [METADATA, ENGINE_CONFIG, COMMON]
    for name in names:
        with (folder / name).open("rb+") as file:
            os.fsync(file.fileno())
    return names


def read_index(folder: Path) -> Metadata:
    """Which tensors a checkpoint holds and where they lie.

    Raises:
        CheckpointError: it cannot be read, or would run code.
    """
    check_pickles(folder)
    with (folder / METADATA).open("rb") as file:
        index: Metadata = _MetadataReader(file).load()
    return index


def check_pickles(folder: Path) -> None:
    """Refuse a checkpoint whose index would run code; everything else in it is read as plain tensors.

    Raises:
        CheckpointError: names the file and the class.
    """
    name = METADATA
    try:
        with (folder / METADATA).open("rb") as file:
            _MetadataReader(file).load()
        name = COMMON
        torch.load(folder / COMMON, weights_only=True)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{folder / name}: cannot be read ({error})") from error
    except pickle.UnpicklingError as error:
        what = str(error).partition("\n")[0] if name == METADATA else _unsafe_class(error)
        raise CheckpointError(
            f"{folder / name}: {what}; it is not loaded, since it may run code: use a checkpoint that you trust"
        ) from error


def _unsafe_class(error: Exception) -> str:
    """What torch would not load, out of its long advice."""
    found = re.search(r"(?:GLOBAL|function) (?:'|`)?([\w.]+)", str(error))
    return f"holds {found[1]}, which is no tensor" if found else "holds more than tensors"


_METADATA_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _MetadataReader(pickle.Unpickler):
    """Reads the index of torch's distributed checkpoints, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _METADATA_CLASSES:
            raise pickle.UnpicklingError(f"holds {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)
