"""Keys stay out of what a run writes, settings run no code, and files are no more open than the user's umask says."""

import os
import stat
import subprocess
import sys

import pytest

from tests.conftest import TINY, options, run_cli

KEY = "0123456789abcdef0123456789abcdef01234567"  # of the form of W&B's


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """Output and folder of a run with W&B, a planted key and a strict umask."""
    runs_dir = tmp_path_factory.mktemp("secure")
    settings = {
        **TINY,
        "data.datasets": f"[{dataset}]",
        "runs_dir": runs_dir,
        "train.steps": 3,
        "tracking.wandb_mode": "offline",
        "tracking.console": "lines",
    }
    result = subprocess.run(
        [sys.executable, "-m", "gnmr_megatron", "train", *options(settings)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        umask=0o027,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": KEY},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr, runs_dir


def test_a_planted_key_is_nowhere_in_what_a_run_says_or_writes(run):
    output, runs_dir = run
    assert KEY not in output
    files = [path for path in runs_dir.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files}
    assert {".yaml", ".jsonl", ".bin", ".distcp", ".wandb"} <= kinds
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_files_are_as_open_as_the_umask_says(run):
    _, runs_dir = run
    modes = {path: path.stat().st_mode for path in runs_dir.rglob("*") if not path.is_symlink()}
    too_open = [path for path, mode in modes.items() if mode & (stat.S_IWGRP | stat.S_IRWXO)]
    assert not too_open


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/name:os.mkdir"])
def test_settings_run_no_code(tmp_path, tag):
    (tmp_path / "evil.yaml").write_text(f"name: {tag} [{tmp_path / 'made'}]\n")
    result = run_cli("train", "--config", tmp_path / "evil.yaml")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"evil.yaml:1: `{tag}` is no plain value; settings run no code" in result.stderr
    assert not (tmp_path / "made").exists()
