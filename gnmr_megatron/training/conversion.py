"""Hugging Face's folders to checkpoints and back, layer by layer; no model is built.

A converted checkpoint is a folder that `init_from` takes: weights in torch's distributed format, checkpoint.json,
config.yaml with the settings that belong to the model, and huggingface/ with what came beside the weights. Memory is
that of one layer, the embedding and the output layer counting as layers, whatever the size of the model.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from torch import Tensor

from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.weight_files import Piece, WeightReader, write_weights
from gnmr_megatron.errors import CheckpointError, ConfigError, DataError
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.huggingface import PlacedWeight, join, split, weights_by_layer
from gnmr_megatron.models.huggingface_config import huggingface_config, llama_config
from gnmr_megatron.models.huggingface_files import DTYPES, HuggingFaceFolder, ShardedWriter
from gnmr_megatron.training.checkpoint_files import (
    PARTIAL,
    CheckpointDescription,
    WrittenFile,
    publish,
    verify,
)
from gnmr_megatron.training.companions import (
    FILES,
    Companions,
    companions_of,
    copy_files,
    tokenizer_in,
    write_companions,
)
from gnmr_megatron.training.identity import LORA_RANK, run_identity, saved_model
from gnmr_megatron.training.initial_weights import find_checkpoint

WEIGHTS_ONLY = "none"
"""The kind of optimizer state in a converted checkpoint."""

Progress = Callable[[int, int], None]
"""Told how many layers are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was written.

    Attributes:
        folder: where.
        parameters: values in it.
        dtype: their type, by torch's name.
        num_bytes: bytes of weights.
        tokenizer: the tokenizer's file in the folder, or None.
        notes: what the user should know, a sentence each.
        seconds: time it took.
    """

    folder: Path
    parameters: int
    dtype: str
    num_bytes: int
    tokenizer: Path | None
    notes: tuple[str, ...]
    seconds: float


def huggingface_to_megatron(
    source: Path, output: Path, *, on_progress: Progress = lambda done, total: None
) -> Conversion:
    """Write a checkpoint out of a folder of Hugging Face's.

    Raises:
        GnmrError: the folder is broken, holds what cannot be represented, or the output exists; nothing is written.
    """
    started = time.perf_counter()
    folder = HuggingFaceFolder(source)
    tokenizer = tokenizer_in(source)
    size, fingerprint, tokenizer_path = None, None, None
    if tokenizer is not None:
        size, fingerprint = tokenizer.vocab_size, tokenizer.fingerprint
        tokenizer_path = output / FILES / tokenizer.path.name
    config = llama_config(folder.config, tokenizer_size=size, where=str(source / "config.json"))
    vocab_size = folder.config["vocab_size"]
    groups = list(weights_by_layer(config, vocab_size))
    stored = folder.check(groups, is_tied=config.tie_embeddings)
    config = dataclasses.replace(config, dtype="bf16" if stored == "BF16" else "fp32")
    dtype = DTYPES[stored]
    placed = {piece_of(item, config): item for group in groups for item in group}

    def make(piece: Piece) -> Tensor:
        item = placed[piece]
        try:
            return join(item, folder.read(list(item.shapes)), config)
        except SafetensorError as error:
            raise DataError(
                f"{source}: {next(iter(item.shapes))} cannot be read: {error}"
            ) from error

    with new_folder(output) as partial:
        names = write_weights(
            partial,
            [[piece_of(item, config) for item in group] for group in groups],
            make,
            dtype=dtype,
            written=lambda files: on_progress(files, len(groups)),
        )
        names += copy_files(source, partial / FILES)
        write_settings(config, tokenizer_path, output, partial)
        CheckpointDescription(
            step=0,
            layout={**dataclasses.asdict(ParallelLayout()), "world_size": 1},
            identity=run_identity(
                config,
                tokenizer=fingerprint,
                vocab_size=vocab_size,
            ),
            optimizer=WEIGHTS_ONLY,
            state={},
            files={name: WrittenFile.of(partial / name) for name in names},
        ).write(partial)
    return Conversion(
        folder=output,
        parameters=_count(groups),
        dtype=str(dtype).removeprefix("torch."),
        num_bytes=_count(groups) * dtype.itemsize,
        tokenizer=tokenizer_path,
        notes=tuple(_notes(vocab_size, size, stored)),
        seconds=time.perf_counter() - started,
    )


def megatron_to_huggingface(
    source: Path,
    output: Path,
    *,
    files_from: Path | None = None,
    max_shard_bytes: int,
    on_progress: Progress = lambda done, total: None,
) -> Conversion:
    """Write a folder that Hugging Face's `from_pretrained` loads, out of a checkpoint.

    Args:
        source: a checkpoint, or a run, whose newest one is taken.
        output: folder to write.
        files_from: folder with config.json and tokenizer files to go along; None finds them by the checkpoint.
        max_shard_bytes: largest size of a safetensors file.
        on_progress: told after each layer.

    Raises:
        GnmrError: the checkpoint is damaged, or the output exists; nothing is written.
    """
    started = time.perf_counter()
    path = find_checkpoint(source)
    description = CheckpointDescription.read(path)
    damages = verify(path)
    if damages:
        raise CheckpointError("\n".join(damages))
    if description.identity.get(LORA_RANK):
        raise ConfigError(
            f"{path}: holds adapters only; for whole weights: gnmr-megatron lora merge {path} --output FOLDER; for "
            f"PEFT: gnmr-megatron lora export {path} --output FOLDER"
        )
    config = saved_model(description.identity)
    fingerprint = description.identity.get("tokenizer")
    companions = companions_of(path, files_from=files_from, fingerprint=fingerprint)
    vocab_size = _vocab_size(path, description, companions)
    groups = list(weights_by_layer(config, vocab_size))
    reader = WeightReader(path)
    dtype = reader.dtype(groups[0][0].weight.megatron)
    name = str(dtype).removeprefix("torch.")
    with new_folder(output) as partial:
        writer = ShardedWriter(partial, max_shard_bytes)
        for number, group in enumerate(groups):
            tensors: dict[str, Tensor] = {}
            for item in group:
                tensors |= split(item, reader.read(piece_of(item, config)), config)
            writer.add(tensors)
            on_progress(number + 1, len(groups))
        num_bytes = writer.finish()
        content = huggingface_config(
            config, vocab_size=vocab_size, dtype=name, other_fields=companions.fields
        )
        tokenizer = write_companions(companions, content, partial)
    return Conversion(
        folder=output,
        parameters=_count(groups),
        dtype=name,
        num_bytes=num_bytes,
        tokenizer=None if tokenizer is None else output / tokenizer,
        notes=() if tokenizer is not None else ("no tokenizer was found to go along",),
        seconds=time.perf_counter() - started,
    )


def _notes(vocab_size: int, tokenizer_size: int | None, stored: str) -> Iterator[str]:
    if tokenizer_size is None:
        yield "there is no tokenizer.json or tokenizer.model to go along"
    elif tokenizer_size < vocab_size:
        yield (
            f"{vocab_size - tokenizer_size} rows of the vocabulary have no entry in the tokenizer; they are kept, and "
            "masked in training"
        )
    if stored == "F16":
        yield "weights are F16 and were widened to FP32, which holds them exactly"


def piece_of(item: PlacedWeight, config: LlamaConfig) -> Piece:
    """Where a weight lies in a checkpoint."""
    return Piece(item.weight.megatron, item.shape, item.layer, config.num_layers)


def _count(groups: Sequence[Sequence[PlacedWeight]]) -> int:
    return sum(item.num_elements for group in groups for item in group)


def _vocab_size(path: Path, description: CheckpointDescription, companions: Companions) -> int:
    size = description.identity.get("vocab_size")
    if size is not None:
        return int(size)
    if companions.tokenizer is None:
        raise ConfigError(
            f"{path}: was saved by a version that did not note the size of the vocabulary; give the tokenizer's folder "
            "with --files-from"
        )
    return companions.tokenizer.vocab_size


def write_settings(config: LlamaConfig, tokenizer: Path | None, output: Path, folder: Path) -> None:
    """config.yaml: what `train` has to know of the model."""
    settings: dict[str, Any] = {
        "init_from": str(output.resolve()),
        "model": dataclasses.asdict(config),
    }
    if tokenizer is not None:
        settings["data"] = {"tokenizer": str(tokenizer.resolve())}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that gets its name when all is in it.

    Raises:
        ConfigError: there is something of that name.
        CheckpointError: it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path}: is there already; choose another --output")
    partial = path.with_name(path.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        publish(partial, path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{path}: cannot be written ({error})") from error
        raise
