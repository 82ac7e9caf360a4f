"""What tests of several rooms share: a small dataset and a small run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A model of 16 units in which every layout of up to four processes fits, and thresholds that it often passes.
TINY = {
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 128,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 4,
    "model.dtype": "fp32",
    "data.sequence_length": 32,
    "precision.group_size": 16,
    "gnmr.alpha": 1.3,
    "gnmr.beta": 1.3,
    "gnmr.delta": 2,
    "gnmr.max_recovered": 3,
    "gnmr.lock_steps": 2,
    "gnmr.warmup_steps": 2,
    "gnmr.check_interval": 1,
    "optimizer.lr": 3e-4,  # low, so that differences of the last bit do not grow into others
    "optimizer.warmup_steps": 2,
    "train.steps": 12,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "train.eval_interval": 0,
    "train.eval_samples": 8,
    "checkpoint.interval": 0,
    "train.timeout_minutes": 1,
    "tracking.console": "quiet",
    "tracking.wandb_mode": "disabled",
}


def options(settings):
    """Command-line options of dotted settings."""
    return [f"--{key}={value}" for key, value in settings.items()]


def run_cli(*arguments, timeout=240, **kwargs):
    """`gnmr-megatron ARGUMENTS` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    return subprocess.run(
        [sys.executable, "-m", "gnmr_megatron", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
        **kwargs,
    )


def prepare_tiny_dataset(folder):
    """Sixty files of the standard library, with a vocabulary that padding has to round up."""
    result = run_cli(
        "prepare-data",
        "stdlib:",
        "--output",
        folder,
        "--vocab-size",
        500,
        "--max-documents",
        60,
        "--workers",
        1,
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The tiny dataset, prepared once."""
    return prepare_tiny_dataset(tmp_path_factory.mktemp("data") / "tiny")
