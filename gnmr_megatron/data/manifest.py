"""What `prepare-data` tells of a dataset, read without torch so that settings are checked at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.data.tokenizer import load_tokenizer
from gnmr_megatron.errors import DataError

MANIFEST = "manifest.json"
PREFIX = "text"
CACHE = "index_cache"
"""Folder beside the first dataset in which the order of samples is kept."""
MASK_PREFIX = "completion"
SCHEMA_VERSION = 1

DatasetKind = Literal["text", "instruction"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a prepared dataset.

    Attributes:
        request: fingerprint of inputs and options that it was made from.
        tokenizer: file name of the tokenizer in the folder.
        tokenizer_fingerprint: hash of that file.
        vocab_size: size of the vocabulary.
        eod: id that ends a document.
        documents: number of documents.
        tokens: number of tokens, document ends included.
        text_bytes: bytes of text.
        empty_documents: documents left out because they hold no text.
        bad_records: records left out because they cannot be read.
        file_bytes: size of each file of the dataset.
        kind: `text`, or `instruction` for examples with a mask of what the model is to write. The rest is of those.
        completion_tokens: tokens that count in the loss.
        longest: most places that an example takes in a sequence, one less than its tokens.
        truncated: examples whose end was cut off.
        too_long: examples left out because they are too long.
        without_completion: examples left out because nothing in them counts in the loss.
    """

    request: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    text_bytes: int
    empty_documents: int
    bad_records: int
    file_bytes: dict[str, int]
    schema_version: int = SCHEMA_VERSION
    kind: DatasetKind = "text"
    completion_tokens: int = 0
    longest: int = 0
    truncated: int = 0
    too_long: int = 0
    without_completion: int = 0

    def write(self, folder: Path) -> None:
        """Write into a dataset's folder."""
        (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What the datasets of a configuration have in common.

    Attributes:
        prefixes: prefix of each dataset's .bin and .idx.
        tokenizer_fingerprint: hash of the tokenizer.
        vocab_size: size of the vocabulary.
        eod: id that ends a document.
        kind: of all of them.
    """

    prefixes: tuple[Path, ...]
    tokenizer_fingerprint: str
    vocab_size: int
    eod: int
    kind: DatasetKind = "text"

    @property
    def mask_prefixes(self) -> tuple[Path, ...]:
        """Prefix of each instruction dataset's mask; none for text."""
        if self.kind == "text":
            return ()
        return tuple(prefix.with_name(MASK_PREFIX) for prefix in self.prefixes)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder, whose files must be whole.

    Raises:
        DataError: there is none, or a file is missing or of another size.
    """
    again = f"prepare it with: gnmr-megatron prepare-data INPUT ... --output {folder}"
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder}: is no prepared dataset, it has no {MANIFEST}; {again}")
    try:
        manifest = Manifest(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path}: is broken or of another version ({error}); {again} --overwrite"
        ) from error
    for name, size in manifest.file_bytes.items():
        file = folder / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise DataError(f"{file}: {state}; {again} --overwrite")
    return manifest


def describe_datasets(config: DataConfig) -> DatasetInfo:
    """Find all datasets of a configuration and check that they share a tokenizer.

    Raises:
        DataError: a dataset is missing or broken, or tokenizers differ.
    """
    prefixes: list[Path] = []
    manifests: dict[str, Manifest] = {}
    for name in config.datasets:
        path = Path(name)
        if (
            path.with_name(path.name + ".idx").exists()
            and path.with_name(path.name + ".bin").exists()
        ):
            prefixes.append(path)
        else:
            manifests[name] = read_manifest(path)
            prefixes.append(path / PREFIX)
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(Path(config.tokenizer))
        fingerprint, vocab_size, eod = tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod
    elif manifests:
        first = next(iter(manifests.values()))
        fingerprint, vocab_size, eod = first.tokenizer_fingerprint, first.vocab_size, first.eod
    else:
        raise DataError(
            "data.tokenizer: is needed, because data.datasets are plain .bin and .idx files"
        )
    for name, manifest in manifests.items():
        if manifest.tokenizer_fingerprint != fingerprint:
            wanted = config.tokenizer or next(iter(manifests))
            raise DataError(
                f"{name}: was prepared with another tokenizer than {wanted}; prepare it again with "
                f"--tokenizer {config.tokenizer or Path(wanted) / manifest.tokenizer}"
            )
    return DatasetInfo(
        prefixes=tuple(prefixes),
        tokenizer_fingerprint=fingerprint,
        vocab_size=vocab_size,
        eod=eod,
        kind=_kind(config, manifests),
    )


def _kind(config: DataConfig, manifests: Mapping[str, Manifest]) -> DatasetKind:
    """What all datasets are, with the checks of instruction data."""
    instruction = [name for name, manifest in manifests.items() if manifest.kind == "instruction"]
    if not instruction:
        return "text"
    others = [name for name in config.datasets if name not in instruction]
    if others:
        raise DataError(
            f"data.datasets: {instruction[0]} is instruction data, but {others[0]} is text; train on one after the "
            "other"
        )
    if config.weights is not None:
        raise DataError(
            "data.weights: instruction datasets are taken by their sizes; set it to null"
        )
    for name in instruction:
        longest = manifests[name].longest
        if longest > config.sequence_length:
            raise DataError(
                f"data.sequence_length: {config.sequence_length} is shorter than the longest example of {name} "
                f"({longest}); raise it, or prepare the data again with --sequence-length {config.sequence_length}"
            )
    return "instruction"
