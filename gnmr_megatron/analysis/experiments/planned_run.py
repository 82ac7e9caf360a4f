"""One run of a suite's matrix."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnmr_megatron.analysis.experiments.suite import Arm, TextSource
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.events import FinishEvent

ENDED = ("completed", "diverged")
"""Reasons of a finish after which a run is a result."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a matrix.

    Attributes:
        arm: its arm.
        seed: its seed.
        folder: run folder.
        base: configuration file.
        settings: dotted keys on top of it.
        budget_from: folder of the run whose recovered units of each step are its budget, or None.
        calibrated_on: folder of the run that its thresholds come from, or None.
        prepared_by: folders of the runs that come before all arms.
        datasets: those that the suite makes, in folders beside the run's.
    """

    arm: Arm
    seed: int
    folder: Path
    base: Path
    settings: Mapping[str, Any]
    budget_from: Path | None = None
    calibrated_on: Path | None = None
    prepared_by: tuple[Path, ...] = ()
    datasets: Mapping[str, TextSource] = field(default_factory=dict)

    @property
    def placed_settings(self) -> dict[str, Any]:
        """The settings, with the folder of all runs in place of `{output}`."""
        return {key: _placed(value, self.folder.parent) for key, value in self.settings.items()}

    @property
    def sidecar(self) -> Path:
        """File with the settings it is started with, which also remembers what they come from."""
        return self.folder.with_name(self.folder.name + ".settings.yaml")

    @property
    def is_done(self) -> bool:
        """Whether it came to an end that is a result."""
        try:
            finishes = list(RecordedRun(self.folder).events_of(FinishEvent))
        except DataError:
            return False
        return bool(finishes) and finishes[-1].reason in ENDED

    @property
    def needs(self) -> list[Path]:
        """Folders of the runs that must be done before it."""
        learnt = [folder for folder in (self.calibrated_on, self.budget_from) if folder is not None]
        return [*self.prepared_by, *learnt]

    def command(self, launch: Sequence[str] = ()) -> list[str]:
        """What takes it, or goes on with it; by `launch` in place of `gnmr-megatron train`."""
        return [
            *(launch or (sys.executable, "-m", "gnmr_megatron", "train")),
            "--config", str(self.base), "--config", str(self.sidecar),
            "--runs_dir", str(self.folder.parent), "--name", self.folder.name, "--resume", "auto",
        ]  # fmt: skip


def _placed(value: Any, output: Path) -> Any:
    if isinstance(value, str):
        return value.replace("{output}", str(output))
    return [_placed(item, output) for item in value] if isinstance(value, list) else value
