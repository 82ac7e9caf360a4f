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
resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25))
file = AppendFile(pathlib.Path(sys.argv[1]))
for record in (b"a" * 10, b"b" * 10, b"c" * 10, b"d" * 5):
    try:
        file.append(record)
    except OSError as error:
        print(type(error).__name__, record[:1].decode())
file.close()
"""


def test_a_record_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "records"
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "OSError c\n"
    assert path.read_bytes() == b"a" * 10 + b"b" * 10 + b"d" * 5


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
