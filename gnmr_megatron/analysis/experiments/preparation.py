"""What comes before the arms of a suite: datasets, and runs that all arms start from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gnmr_megatron.analysis.experiments.origin import MANIFEST
from gnmr_megatron.analysis.experiments.planned_run import PlannedRun
from gnmr_megatron.analysis.experiments.suite import Arm, Size, Suite
from gnmr_megatron.errors import DataError


def plan_preparation(suite: Suite, size: Size, output: Path) -> list[PlannedRun]:
    """The runs that come before all arms."""
    return [
        PlannedRun(
            arm=Arm(name=name, settings=settings),
            seed=size.seeds[0],
            folder=output / name,
            base=size.base,
            settings={**settings, "seed": size.seeds[0], **size.preparation.get(name, {})},
            datasets=suite.datasets,
        )
        for name, settings in suite.preparation.items()
        if size.prepares
    ]


def prepare_datasets(suite: Suite, size: Size, output: Path, runs: Sequence[PlannedRun]) -> None:
    """Make the datasets of a suite.

    Once a run was started one that is there stays as it is, though its inputs may have changed: all runs are to read
    the same.

    Raises:
        DataError: one cannot be made; what `prepare-data` says.
    """
    is_started = any(run.sidecar.exists() for run in runs)
    for command in dataset_commands(suite, size, output):
        if is_started and (Path(command[-1]) / MANIFEST).exists():
            continue
        result = subprocess.run(
            [sys.executable, "-m", "gnmr_megatron", *command, "--overwrite"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if result.returncode != 0:
            raise DataError(f"{command[-1]}: {result.stderr.strip()}")


def dataset_commands(suite: Suite, size: Size, output: Path) -> list[list[str]]:
    """The verbs that make the datasets of a suite; the last word of each is the dataset's folder."""
    return [
        ["prepare-data", *text.inputs, "--tokenizer-from", text.tokenizer_from, "--output", str(output / name)]
        for name, text in suite.datasets.items()
        if size.prepares
    ]  # fmt: skip
