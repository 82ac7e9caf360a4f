import subprocess
import sys
from pathlib import Path

import pytest

from gnmr_megatron.observability.append_file import AppendFile, replace_file

ROOT = Path(__file__).parents[3]

# The limit on the file's size stands for a full disk: write() takes part of the record, then fails.
FULL_DISK = """
import pathlib, resource, signal, sys
from gnmr_megatron.observability.append_file import AppendFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (25, 100))
path = pathlib.Path(sys.argv[1])
file = AppendFile(path)
for record in (b"a" * 10, b"b" * 10, b"c" * 10, b"d" * 5):
    try:
        file.append(record)
    except OSError as error:
        print(type(error).__name__, record[:1].decode(), path.read_bytes().decode())
if sys.argv[2] == "freed":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
file.close()
"""


def write_on_a_full_disk(path, then):
    return subprocess.run(
        [sys.executable, "-c", FULL_DISK, path, then],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_record_that_does_not_fit_is_taken_back_and_waits_with_those_behind_it(tmp_path):
    path = tmp_path / "records"
    result = write_on_a_full_disk(path, "freed")
    assert result.returncode == 0, result.stderr
    full = "a" * 10 + "b" * 10
    assert result.stdout == f"OSError c {full}\nOSError d {full}\n"
    assert path.read_bytes() == b"a" * 10 + b"b" * 10 + b"c" * 10 + b"d" * 5


def test_records_that_wait_at_the_end_are_an_error(tmp_path):
    result = write_on_a_full_disk(tmp_path / "records", "full")
    assert result.returncode == 1
    assert "OSError" in result.stderr
    assert (tmp_path / "records").read_bytes() == b"a" * 10 + b"b" * 10


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path):
    file = AppendFile(tmp_path / "records")
    for size in (1, 10, 100_000):
        before = file_size(tmp_path / "records")
        file.append(b"x" * size)
        assert file_size(tmp_path / "records") == before + size
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        file.append(b"x")


def file_size(path):
    return path.stat().st_size


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "units.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
