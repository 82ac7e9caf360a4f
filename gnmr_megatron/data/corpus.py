"""Documents out of files, folders and standard input."""

from __future__ import annotations

import gzip
import io
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from gnmr_megatron.errors import DataError

STDIN = "-"
STDLIB = "stdlib:"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
COMPRESSIONS = (".gz", ".zst")
KNOWN = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
}


@dataclass(frozen=True)
class Document:
    """Text of one document, which is not empty."""

    text: str


@dataclass(frozen=True)
class EmptyDocument:
    """A document without any text."""


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read.

    Attributes:
        file: where it is.
        line: 1-based line, or row of a Parquet file.
        reason: what is wrong with it.
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class JsonRecord:
    """The value of one line of JSON lines.

    Attributes:
        file: where it is.
        line: 1-based line.
        value: what the JSON says.
    """

    file: str
    line: int
    value: Any


Record = Document | EmptyDocument | BadRecord


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which field of structured files holds the text.

    Attributes:
        json_key: key in the objects of .jsonl files.
        parquet_column: column of .parquet files.
        stdin_is_jsonl: whether standard input is JSON lines; else it is one document of text.
    """

    json_key: str = "text"
    parquet_column: str = "text"
    stdin_is_jsonl: bool = False


def find_files(source: str, kinds: Sequence[str] = KNOWN) -> tuple[list[Path], int]:
    """Files of a source in a fixed order, and how many others a folder holds.

    Args:
        source: a file, a folder (searched recursively for known types), or `stdlib:` for the source text of
            Python's own standard library.
        kinds: suffixes of the known types.

    Raises:
        DataError: it does not exist, is of no known type, or holds no file of one.
    """
    if source == STDLIB:
        if ".py" not in kinds:
            raise DataError(f"{source}: is text, not conversations; leave out --format chat")
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(
            path
            for path in root.rglob("*.py")
            if not NOT_LIBRARY & set(path.relative_to(root).parts)
        ), 0
    path = Path(source)
    if path.is_dir():
        files = sorted(item for item in path.rglob("*") if item.is_file())
        known = [item for item in files if _kind(item) in kinds]
        if not known:
            raise DataError(
                f"{source}: the folder holds no file of a known type ({', '.join(kinds)})"
            )
        return known, len(files) - len(known)
    if not path.exists():
        raise DataError(f"{source}: does not exist")
    if _kind(path) not in kinds:
        raise DataError(
            f"{source}: is of no known type ({', '.join(kinds)}, each also as .gz or .zst but Parquet)"
        )
    return [path], 0


def read_file(path: Path, fields: Fields) -> Iterator[Record]:
    """Records of a file, one after the other.

    Raises:
        DataError: the file as a whole cannot be read.
    """
    kind = _kind(path)
    if kind == ".parquet":
        yield from _read_parquet(path, fields.parquet_column)
        return
    with _reading(path) as stream:
        yield from _read_stream(
            stream, str(path), is_jsonl=kind == ".jsonl", json_key=fields.json_key
        )


def read_json_lines(path: Path | None) -> Iterator[JsonRecord | BadRecord]:
    """Values of a file of JSON lines, or of standard input for None; empty lines are passed over.

    Raises:
        DataError: the file as a whole cannot be read.
    """
    if path is None:
        yield from _json_lines(sys.stdin.buffer, "standard input")
        return
    with _reading(path) as stream:
        yield from _json_lines(stream, str(path))


def read_stdin(fields: Fields) -> Iterator[Record]:
    """Records of standard input."""
    return _read_stream(
        sys.stdin.buffer, "standard input", is_jsonl=fields.stdin_is_jsonl, json_key=fields.json_key
    )


def _kind(path: Path) -> str | None:
    """The suffix that tells how to read a file, or None."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        inner = suffixes[-2] if len(suffixes) > 1 else ""
        return inner if inner in KNOWN and inner != ".parquet" else None
    return path.suffix if path.suffix in KNOWN else None


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        with closing(_open(path)) as stream:
            yield stream
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path)  # type: ignore[return-value]  # GzipFile is a stream of bytes
    if path.suffix == ".zst":
        stream = zstandard.ZstdDecompressor().stream_reader(
            path.open("rb"), read_across_frames=True
        )
        return io.BufferedReader(stream)
    return path.open("rb")


def _read_stream(
    stream: IO[bytes], name: str, *, is_jsonl: bool, json_key: str
) -> Iterator[Record]:
    if is_jsonl:
        for record in _json_lines(stream, name):
            yield record if isinstance(record, BadRecord) else _text_of(record, json_key)
        return
    data = stream.read()
    try:
        yield _document(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        yield BadRecord(
            name, data.count(b"\n", 0, error.start) + 1, f"is not UTF-8 ({error.reason})"
        )


def _json_lines(stream: IO[bytes], name: str) -> Iterator[JsonRecord | BadRecord]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            try:
                yield JsonRecord(name, number, json.loads(line.decode("utf-8")))
            except UnicodeDecodeError as error:
                yield BadRecord(name, number, f"is not UTF-8 ({error.reason})")
            except (ValueError, RecursionError) as error:
                yield BadRecord(name, number, f"is not JSON ({error})")


def _text_of(record: JsonRecord, key: str) -> Record:
    value = record.value
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        return BadRecord(record.file, record.line, f"has no text under the key '{key}'")
    if not is_unicode(value[key]):
        return BadRecord(record.file, record.line, f"'{key}' holds half of a surrogate pair")
    return _document(value[key])


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a text: JSON can write halves of surrogate pairs, which stand for no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path, column: str) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise DataError(
                f"{path}: has no column '{column}'; it has {', '.join(file.schema_arrow.names)}"
            )
        row = 0
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _cell(value, str(path), row)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _cell(value: Any, name: str, row: int) -> Record:
    if value is None:
        return EmptyDocument()
    return _document(value) if isinstance(value, str) else BadRecord(name, row, "is not text")


def _document(text: str) -> Record:
    return Document(text) if text.strip() else EmptyDocument()
