import gzip
import io
import json

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from gnmr_megatron.data import corpus
from gnmr_megatron.data.corpus import (
    BadRecord,
    Document,
    EmptyDocument,
    Fields,
    find_files,
    read_file,
)
from gnmr_megatron.errors import DataError

LINES = [{"text": "eins"}, {"text": " \n"}, {"text": "zwei"}]


def write(path, data):
    path.write_bytes(data)
    return path


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", lambda data: data),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.zst", lambda data: zstandard.ZstdCompressor().compress(data)),
    ],
)
def test_json_lines_give_a_document_a_line_compressed_or_not(tmp_path, name, pack):
    path = write(tmp_path / name, pack(jsonl(LINES)))
    assert list(read_file(path, Fields())) == [Document("eins"), EmptyDocument(), Document("zwei")]


def test_a_text_file_is_one_document(tmp_path):
    path = write(tmp_path / "a.txt", b"Zeile 1\nZeile 2\n")
    assert list(read_file(path, Fields())) == [Document("Zeile 1\nZeile 2\n")]


def test_a_parquet_column_gives_a_document_a_row(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["eins", None, "zwei"]}), tmp_path / "a.parquet")
    records = list(read_file(tmp_path / "a.parquet", Fields(parquet_column="body")))
    assert records == [Document("eins"), EmptyDocument(), Document("zwei")]


def test_a_missing_parquet_column_is_an_error_that_lists_those_there_are(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["x"], "url": ["y"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: has no column 'text'; it has body, url"):
        list(read_file(tmp_path / "a.parquet", Fields()))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken\n", "is not JSON"),
        (b'{"text": "\xff"}\n', "is not UTF-8"),
        (b'{"body": "x"}\n', "has no text under the key 'text'"),
        (b'{"text": 3}\n', "has no text under the key 'text'"),
        (b'["text"]\n', "has no text under the key 'text'"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line_and_the_rest_is_read(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", jsonl(LINES[:1]) + line + jsonl(LINES[2:]))
    first, bad, last = read_file(path, Fields())
    assert (first, last) == (Document("eins"), Document("zwei"))
    assert isinstance(bad, BadRecord)
    assert str(bad).startswith(f"{path}:2: {reason}")


def test_invalid_utf8_in_a_text_file_names_its_line(tmp_path):
    path = write(tmp_path / "a.txt", b"eins\nzwei\ndr\xffi\n")
    (bad,) = read_file(path, Fields())
    assert (bad.file, bad.line) == (str(path), 3)


def test_a_truncated_archive_is_an_error_that_names_the_file(tmp_path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"x" * 10_000)[:-20])
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read"):
        list(read_file(path, Fields()))


def test_a_folder_gives_its_known_files_in_order_and_counts_the_others(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "b/a.jsonl.gz", "b/picture.png", "a.md"):
        (tmp_path / name).write_bytes(b"")
    files, others = find_files(str(tmp_path))
    assert [str(file.relative_to(tmp_path)) for file in files] == ["a.md", "b/a.jsonl.gz", "z.txt"]
    assert others == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "does not exist"),
        ("a.pdf", "is of no known type"),
        ("empty", "holds no file of a known type"),
    ],
)
def test_an_input_that_cannot_be_read_is_refused(tmp_path, name, message):
    (tmp_path / "a.pdf").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        find_files(str(tmp_path / name))


def test_the_standard_library_is_found_without_tests_and_third_parties():
    files, _ = find_files("stdlib:")
    names = {file.name for file in files}
    assert {"argparse.py", "sysconfig.py"} <= names or "argparse.py" in names
    assert not any(
        {"site-packages", "test", "__pycache__"} & set(file.parts[-4:]) for file in files
    )
    assert files == sorted(files)


def test_standard_input_is_text_or_json_lines(monkeypatch):
    for is_jsonl, data, expected in (
        (False, b"ein Text\n", [Document("ein Text\n")]),
        (True, jsonl(LINES), [Document("eins"), EmptyDocument(), Document("zwei")]),
    ):
        monkeypatch.setattr(corpus.sys, "stdin", type("Stdin", (), {"buffer": io.BytesIO(data)}))
        assert list(corpus.read_stdin(Fields(stdin_is_jsonl=is_jsonl))) == expected
