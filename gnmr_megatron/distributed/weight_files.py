"""Weights of a checkpoint, written and read piece by piece without a model: torch's distributed format, one process."""

from __future__ import annotations

import pickle  # only its error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gnmr_megatron.distributed.checkpoint_index import read_index, write_engine_files
from gnmr_megatron.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint, or one layer of it.

    Attributes:
        key: the tensor's.
        shape: of the piece, without the dimension of layers.
        layer: index in the first dimension of the tensor, or None where the piece is all of it.
        num_layers: size of that dimension.
    """

    key: str
    shape: tuple[int, ...]
    layer: int | None = None
    num_layers: int = 0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.shape if self.layer is None else (self.num_layers, *self.shape)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where the piece lies in the tensor."""
        if self.layer is None:
            offsets, sizes = (0,) * len(self.shape), self.shape
        else:
            offsets, sizes = (self.layer, *(0 for _ in self.shape)), (1, *self.shape)
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def write_weights(
    folder: Path,
    files: Sequence[Sequence[Piece]],
    make: Callable[[Piece], Tensor],
    *,
    dtype: torch.dtype,
    written: Callable[[int], None] = lambda files: None,
) -> list[str]:
    """Write a checkpoint's tensors, holding one piece in memory at a time and at most the pieces of one file.

    Args:
        folder: an empty folder.
        files: which pieces go into each file.
        make: gives the tensor of a piece when it is its turn.
        dtype: type of all tensors.
        written: told how many files are there, after each.

    Returns:
        Names of all files.

    Raises:
        OSError: the disk does not take them.
    """
    # copy_ahead 0: one after the other, also where there is a GPU
    writer = _NamelessWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    properties = TensorProperties(dtype=dtype)
    plans, index = create_default_global_save_plan(
        [SavePlan([_write_item(piece, properties) for piece in pieces]) for pieces in files]
    )
    planner = _MakesPieces({_place(piece): piece for pieces in files for piece in pieces}, make)
    results = []
    for number, plan in enumerate(writer.prepare_global_plan(plans)):
        results.append(writer.write_data(plan, planner).wait())
        written(number + 1)
    writer.finish(index, results)
    names = {result.storage_data.relative_path for parts in results for result in parts}
    return sorted(names) + write_engine_files(folder)


class WeightReader:
    """Reads pieces of a checkpoint's tensors, in whatever layout it was saved.

    Args:
        folder: the checkpoint.

    Raises:
        CheckpointError: its index cannot be read, or would run code.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = read_index(folder)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)

    def dtype(self, key: str) -> torch.dtype:
        """Type of a tensor.

        Raises:
            CheckpointError: there is no such tensor.
        """
        return self._tensor(key).properties.dtype

    def read(self, piece: Piece) -> Tensor:
        """One piece.

        Raises:
            CheckpointError: the tensor is missing, of another shape, or its file is damaged.
        """
        entry = self._tensor(piece.key)
        if tuple(entry.size) != piece.whole_shape:
            raise CheckpointError(
                f"{self._folder}: {piece.key} has shape {list(entry.size)}, its checkpoint.json needs "
                f"{list(piece.whole_shape)}"
            )
        target = torch.empty(piece.chunk.sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(piece.key, entry, [piece.chunk])
        try:
            self._reader.read_data(LoadPlan(items), _FillsPiece(target)).wait()
        except (OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{self._folder}: {piece.key} cannot be read ({reason}); see gnmr-megatron checkpoint verify"
            ) from error
        return target.reshape(piece.shape)

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self._index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder}: has no tensor {key}")
        return entry


class _NamelessWriter(FileSystemWriter):
    """Leaves out of the index where it was written, which the folder's name tells better."""

    def storage_meta(self) -> StorageMeta:
        """Nothing in it."""
        return StorageMeta()


class _MakesPieces(DefaultSavePlanner):
    """Makes each piece when the writer comes to it."""

    def __init__(
        self, pieces: Mapping[MetadataIndex, Piece], make: Callable[[Piece], Tensor]
    ) -> None:
        super().__init__()
        self._pieces, self._make = pieces, make

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor of an item, with the dimension of layers."""
        piece = self._pieces[write_item.index]
        return self._make(piece).reshape(piece.chunk.sizes)


class _FillsPiece(DefaultLoadPlanner):
    """Has every part that is read copied into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a part belongs."""
        part = self._target
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the part is a view."""


def _place(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, piece.chunk.offsets)


def _write_item(piece: Piece, properties: TensorProperties) -> WriteItem:
    data = TensorWriteData(piece.chunk, properties, torch.Size(piece.whole_shape))
    return WriteItem(_place(piece), WriteItemType.SHARD, tensor_data=data)
