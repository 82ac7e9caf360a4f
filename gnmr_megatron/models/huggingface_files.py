"""A folder of Hugging Face's: config.json, safetensors in one or several files, and their index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from gnmr_megatron.errors import DataError
from gnmr_megatron.models.huggingface import PlacedWeight

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float32}
"""Type in which each of safetensors' types is kept; F16 fits into FP32 without loss."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        path: the safetensors file.
        dtype: by safetensors' name.
        shape: its shape.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]


class HuggingFaceFolder:
    """A folder that `save_pretrained` wrote; only headers are read until tensors are asked for.

    Args:
        path: the folder.

    Raises:
        DataError: a file is missing or broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise DataError(f"{path}: is no folder; give one that holds {CONFIG} and {WEIGHTS}")
        self.config = read_json(path / CONFIG)
        self.tensors = self._headers()

    def check(self, groups: Sequence[Sequence[PlacedWeight]], *, is_tied: bool) -> str:
        """Compare names, shapes and types with those of the model.

        Args:
            groups: from `weights_by_layer`.
            is_tied: whether the output layer is the embedding; a copy of it in the folder must be equal.

        Returns:
            The type of all weights, by safetensors' name.

        Raises:
            DataError: a tensor is missing, unknown, or of another shape or type.
        """
        shapes = {
            name: shape for group in groups for item in group for name, shape in item.shapes.items()
        }
        problems = list(self._tensor_problems(shapes, is_tied=is_tied))
        if problems:
            more = f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
            raise DataError("\n".join(problems[:10]) + more)
        return self.tensors[next(iter(shapes))].dtype

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Tensors by name, in a type that holds them exactly; a file is mapped only until they are read.

        Raises:
            DataError: a file cannot be read.
        """
        found: dict[str, Tensor] = {}
        for path in dict.fromkeys(self.tensors[name].path for name in names):
            with _opened(path) as file:
                for name in names:
                    if self.tensors[name].path == path:
                        dtype = DTYPES[self.tensors[name].dtype]
                        found[name] = file.get_tensor(name).to(dtype)
        return [found[name] for name in names]

    def _headers(self) -> dict[str, StoredTensor]:
        index = self.path / INDEX
        if not index.exists():
            return dict(_header(self._file(WEIGHTS)))
        content = read_json(index)
        names = content.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise DataError(f"{index}: has no weight_map of tensors to files")
        tensors: dict[str, StoredTensor] = {}
        for file in dict.fromkeys(names.values()):
            stored = dict(_header(self._file(file)))
            listed = [name for name, where in names.items() if where == file]
            absent = [name for name in listed if name not in stored]
            if absent:
                raise DataError(
                    f"{self.path / file}: lacks {absent[0]}, which {INDEX} says is there"
                )
            tensors |= {name: stored[name] for name in listed}
        return tensors

    def _file(self, name: str) -> Path:
        path = self.path / name
        if Path(name).name != name:
            raise DataError(f"{self.path / INDEX}: names {name}, which is outside of the folder")
        if not path.is_file():
            only = " (pickles are not read: save the model as safetensors)"
            hint = only if next(self.path.glob("*.bin"), None) else ""
            raise DataError(f"{path}: is missing{hint}")
        return path

    def _tensor_problems(
        self, shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool
    ) -> Iterator[str]:
        for name, shape in shapes.items():
            stored = self.tensors.get(name)
            if stored is None:
                yield f"{self.path}: has no tensor {name}"
            elif stored.shape != shape:
                yield f"{stored.path}: {name} has shape {list(stored.shape)}, {CONFIG} needs {list(shape)}"
        of_the_model = {*shapes, "lm_head.weight"}  # a tied copy, too: it is compared
        dtypes = {
            stored.dtype: name for name, stored in self.tensors.items() if name in of_the_model
        }
        for dtype, name in dtypes.items():
            if dtype not in DTYPES:
                yield f"{self.tensors[name].path}: {name} is of type {dtype}, only {', '.join(DTYPES)} are read"
        if len(dtypes) > 1:
            yield f"{self.path}: has tensors of several types: " + ", ".join(
                f"{name} is {dtype}" for dtype, name in dtypes.items()
            )
        for name in sorted(self.tensors.keys() - shapes.keys()):
            if is_tied and name == "lm_head.weight":
                yield from self._tied_problems()
            elif not name.endswith(".rotary_emb.inv_freq"):  # a buffer that older versions saved
                yield f"{self.tensors[name].path}: {name} is no tensor of this model"

    def _tied_problems(self) -> Iterator[str]:
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        both = [self.tensors[name] for name in (head, embedding) if name in self.tensors]
        if len(both) < 2 or any(stored.dtype not in DTYPES for stored in both):
            return  # told by then
        if not torch.equal(*self.read([head, embedding])):
            yield (
                f"{self.tensors[head].path}: {head} is not {embedding}, but tie_word_embeddings in {CONFIG} "
                "says so"
            )


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file.

    Raises:
        DataError: it cannot be read or holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold a JSON object")
    return content


class ShardedWriter:
    """Writes a model's tensors as they come, into files that hold no more than one `add` gives or `max_bytes`.

    Args:
        folder: where.
        max_bytes: largest size of a file; a single tensor may be larger.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._files: list[list[str]] = []
        self._num_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors, all of one layer."""
        pending: dict[str, Tensor] = {}
        size = 0
        for name, tensor in tensors.items():
            if pending and size + tensor.nbytes > self._max_bytes:
                self._write(pending)
                pending, size = {}, 0
            pending[name] = tensor
            size += tensor.nbytes
        self._write(pending)

    def finish(self) -> int:
        """Give the files their final names and write the index; returns the bytes of all tensors."""
        total, names = len(self._files), {}
        for number, tensors in enumerate(self._files):
            name = f"model-{number + 1:05}-of-{total:05}.safetensors"
            self._unfinished(number).rename(self._folder / name)
            names.update(dict.fromkeys(tensors, name))
        content = {
            "metadata": {"total_size": self._num_bytes},
            "weight_map": dict(sorted(names.items())),
        }
        (self._folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
        return self._num_bytes

    def _write(self, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self._unfinished(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(tensors))
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _unfinished(self, number: int) -> Path:
        return self._folder / f"part-{number:05}"


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: is no whole safetensors file ({error})") from error


def _header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  # no mapping
            part = file.get_slice(name)
            yield name, StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
