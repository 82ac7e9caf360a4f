"""From text to a tokenizer and a Megatron indexed dataset, in one folder that is whole or not there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from gnmr_megatron.data.corpus import (
    KNOWN,
    STDIN,
    BadRecord,
    Document,
    EmptyDocument,
    Fields,
    Record,
    find_files,
    read_file,
    read_stdin,
)
from gnmr_megatron.data.instruction.options import InstructionOptions
from gnmr_megatron.data.instruction.writing import INPUT_KINDS, write_examples
from gnmr_megatron.data.manifest import MANIFEST, PREFIX, Manifest, read_manifest
from gnmr_megatron.data.tally import SHOWN_BAD_RECORDS, Tally, too_many_bad
from gnmr_megatron.data.tokenizer import Tokenizer, file_hash, load_tokenizer, train_sentencepiece
from gnmr_megatron.data.workers import map_batches
from gnmr_megatron.errors import DataError

TOKENIZER_SAMPLE_BYTES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """What to prepare.

    Attributes:
        inputs: files, folders, `-` or `stdlib:`.
        output: folder to write.
        tokenizer: tokenizer to use; None trains one.
        vocab_size: size of a tokenizer to train.
        fields: where the text is in structured files.
        workers: processes that tokenise.
        max_bad: records that may be unreadable.
        max_documents: stop after so many documents; None for all.
        overwrite: replace a folder that was made from another request.
        instruction: how to read conversations; None for text.
    """

    inputs: tuple[str, ...]
    output: Path
    tokenizer: Path | None = None
    vocab_size: int = 8192
    fields: Fields = field(default_factory=Fields)
    workers: int = 1
    max_bad: int = 0
    max_documents: int | None = None
    overwrite: bool = False
    instruction: InstructionOptions | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("vocab_size", 1),
            ("workers", 1),
            ("max_bad", 0),
            ("max_documents", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"--{name.replace('_', '-')}: {value} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """What came of it.

    Attributes:
        folder: where it lies.
        manifest: description of the dataset.
        is_reused: whether it was there already, from the same request.
        bad_records: the first of those that were left out.
        other_files: files in folders that are of no known type.
        seconds: time it took.
    """

    folder: Path
    manifest: Manifest
    is_reused: bool
    bad_records: tuple[BadRecord, ...]
    other_files: int
    seconds: float


def prepare(
    request: PrepareRequest, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> PreparedData:
    """Read, tokenise and write; an equal request is not done again.

    Args:
        request: what to prepare.
        on_progress: told documents done, and bytes of text done, after each batch.

    Raises:
        DataError: an input or the output fails, too many records are bad, there is no text, or the folder holds
            something else.
    """
    started = time.monotonic()
    if request.tokenizer is not None and not request.tokenizer.is_file():
        hint = "; name a folder with --tokenizer-from" if request.tokenizer.is_dir() else ""
        raise DataError(f"--tokenizer: {request.tokenizer} is no file{hint}")
    files, other_files = _find_all(request)
    fingerprint = _fingerprint(request, files)
    existing = _existing(request, fingerprint)
    if existing is not None:
        return PreparedData(
            folder=request.output,
            manifest=existing,
            is_reused=True,
            bad_records=(),
            other_files=other_files,
            seconds=time.monotonic() - started,
        )
    partial = request.output.with_name(f".{request.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"--output: {request.output} cannot be written: {error}") from error
    try:
        tokenizer = _tokenizer(request, files, partial)
        tally = _write(request, files, tokenizer, partial, on_progress)
        manifest = Manifest(
            kind="text" if request.instruction is None else "instruction",
            request=fingerprint,
            tokenizer=tokenizer.path.name,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            documents=tally.documents,
            tokens=tally.tokens,
            text_bytes=tally.text_bytes,
            empty_documents=tally.empty,
            bad_records=len(tally.bad),
            completion_tokens=tally.completion_tokens,
            longest=tally.longest,
            truncated=tally.truncated,
            too_long=tally.too_long,
            without_completion=tally.without_completion,
            file_bytes={path.name: path.stat().st_size for path in sorted(partial.iterdir())},
        )
        manifest.write(partial)
        _put_in_place(partial, request.output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return PreparedData(
        folder=request.output,
        manifest=manifest,
        is_reused=False,
        bad_records=tuple(tally.bad[:SHOWN_BAD_RECORDS]),
        other_files=other_files,
        seconds=time.monotonic() - started,
    )


def _find_all(request: PrepareRequest) -> tuple[list[Path], int]:
    """Files of all inputs in order, standard input left out, and the number of other files in folders."""
    if STDIN in request.inputs and len(request.inputs) > 1:
        raise DataError("-: standard input cannot be mixed with other inputs")
    kinds = KNOWN if request.instruction is None else INPUT_KINDS
    found = [find_files(source, kinds) for source in request.inputs if source != STDIN]
    return [path for files, _ in found for path in files], sum(others for _, others in found)


def _fingerprint(request: PrepareRequest, files: list[Path]) -> str:
    """Hash of everything that determines the result; random for standard input, which cannot be read twice."""
    options = dataclasses.asdict(request)
    for name in ("output", "overwrite", "workers", "inputs"):
        options.pop(name)
    if request.instruction is None:
        options.pop("instruction")
    options["tokenizer"] = file_hash(request.tokenizer) if request.tokenizer else None
    options["files"] = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files
    ]
    if STDIN in request.inputs:
        options["stdin"] = random.SystemRandom().random()
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def _existing(request: PrepareRequest, fingerprint: str) -> Manifest | None:
    """The manifest of a folder that this very request has made; None where it is to be made."""
    if not request.output.exists():
        return None
    if not (request.output / MANIFEST).exists():
        if request.output.is_dir() and not any(request.output.iterdir()):
            return None
        raise DataError(
            f"{request.output}: exists and is no prepared dataset; choose another --output"
        )
    if request.overwrite:
        return None
    manifest = read_manifest(request.output)
    if manifest.request != fingerprint:
        raise DataError(
            f"{request.output}: holds a dataset of other inputs or options; choose another --output, or replace it "
            "with --overwrite"
        )
    return manifest


def _records(request: PrepareRequest, files: list[Path]) -> Iterator[Record]:
    if STDIN in request.inputs:
        yield from read_stdin(request.fields)
    for path in files:
        yield from read_file(path, request.fields)


def _tokenizer(request: PrepareRequest, files: list[Path], folder: Path) -> Tokenizer:
    """Copy or train the tokenizer into the folder."""
    if request.tokenizer is None and request.instruction is not None:
        raise DataError(
            "--format chat: needs the tokenizer of the model that is tuned; name its dataset or folder with "
            "--tokenizer-from, or its file with --tokenizer"
        )
    if request.tokenizer is not None:
        source = load_tokenizer(request.tokenizer)
        target = folder / ("tokenizer.json" if source.path.suffix == ".json" else "tokenizer.model")
        shutil.copyfile(source.path, target)
        return load_tokenizer(target)
    if STDIN in request.inputs:
        raise DataError(
            "-: standard input is read once, so a tokenizer cannot be trained on it; give --tokenizer"
        )
    target = folder / "tokenizer.model"
    model, _ = train_sentencepiece(_sample_lines(request, files), vocab_size=request.vocab_size)
    target.write_bytes(model)
    return load_tokenizer(target)


def _sample_lines(request: PrepareRequest, files: list[Path]) -> Iterator[str]:
    """Lines of files drawn in a fixed random order, up to a bound in bytes."""
    drawn = files.copy()
    random.Random(0).shuffle(drawn)
    size = 0
    for path in drawn:
        for record in read_file(path, request.fields):
            if isinstance(record, Document):
                yield from record.text.split("\n")
                size += len(record.text)
            if size > TOKENIZER_SAMPLE_BYTES:
                return


def _write(
    request: PrepareRequest,
    files: list[Path],
    tokenizer: Tokenizer,
    folder: Path,
    on_progress: Callable[[int, int], None],
) -> Tally:
    if request.instruction is None:
        return _write_documents(request, files, tokenizer, folder, on_progress)
    return write_examples(
        [None] if STDIN in request.inputs else files,
        request.instruction,
        tokenizer,
        folder,
        workers=request.workers,
        max_bad=request.max_bad,
        max_examples=request.max_documents,
        on_progress=on_progress,
    )


def _write_documents(
    request: PrepareRequest,
    files: list[Path],
    tokenizer: Tokenizer,
    folder: Path,
    on_progress: Callable[[int, int], None],
) -> Tally:
    # imported here: megatron-core brings torch, which a refused request does not need
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tally = Tally()
    prefix = folder / PREFIX
    builder = IndexedDatasetBuilder(
        str(prefix.with_suffix(".bin")), dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    texts = _counted(_records(request, files), request, tally)
    with closing(builder.data_file):
        for documents in map_batches(texts, _EncodeTexts, tokenizer.path, workers=request.workers):
            for ids in documents:
                builder.add_document([*ids, tokenizer.eod], [len(ids) + 1])
                tally.documents += 1
                tally.tokens += len(ids) + 1
            on_progress(tally.documents, tally.text_bytes)
    builder.finalize(str(prefix.with_suffix(".idx")))
    if tally.documents == 0:
        raise DataError(
            f"{', '.join(request.inputs)}: holds no text ({tally.empty} empty documents, {len(tally.bad)} bad records)"
        )
    return tally


def _counted(records: Iterator[Record], request: PrepareRequest, tally: Tally) -> Iterator[str]:
    """Texts of the documents; empty and bad records are counted, the latter up to the limit."""
    taken = 0
    for record in records:
        if isinstance(record, EmptyDocument):
            tally.empty += 1
        elif isinstance(record, BadRecord):
            tally.bad.append(record)
            if len(tally.bad) > request.max_bad:
                raise too_many_bad(tally, request.max_bad)
        else:
            tally.text_bytes += len(record.text.encode())
            yield record.text
            taken += 1
            if taken == request.max_documents:
                return


class _EncodeTexts:
    """Ids of texts."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = load_tokenizer(tokenizer)

    def __call__(self, batch: list[str], /) -> list[list[int]]:
        return [self._tokenizer.encode(text) for text in batch]


def _put_in_place(partial: Path, output: Path) -> None:
    """Make the finished folder the output; an old one goes only when the new one is complete."""
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    partial.replace(output)
    shutil.rmtree(old, ignore_errors=True)
