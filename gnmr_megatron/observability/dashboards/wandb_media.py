"""What W&B shows besides scalars: the table of recovery sets, a heat map, bar charts, artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnmr_megatron.observability.console import short_unit
from gnmr_megatron.observability.dashboards.heat_map import draw_heat_map
from gnmr_megatron.observability.dashboards.wandb_run import TABLE
from gnmr_megatron.observability.events import CheckpointEvent, DecisionEvent, SelectedUnit
from gnmr_megatron.observability.risk_matrix import RiskMatrix

if TYPE_CHECKING:
    import wandb
    from wandb.plot.custom_chart import CustomChart

COLUMNS: list[str | int] = ["step", "unit", "gnmr", "delta_gnmr", "score", "lock", "reason"]
NUM_BARS = 12
LONGEST_BAR = 1000.0  # a GNMR beyond it, or one that is no number, is drawn as this
MAX_FILES = 10_000_000  # of a checkpoint; W&B's own limit is too low for thousands of ranks


class RecoveryTable:
    """The recovery sets of a run, sent in parts that W&B joins."""

    def __init__(self) -> None:
        import wandb

        self._table = wandb.Table(columns=COLUMNS, log_mode="INCREMENTAL")
        self._rows: list[tuple[int, SelectedUnit]] = []
        self._is_due = False

    def add(self, event: DecisionEvent) -> None:
        """Keep the units of a decision for the next part."""
        self._rows += [(event.step, unit) for unit in event.selected]

    def new_part(self) -> dict[str, wandb.Table]:
        """What to log: the rows since the last part that was sent, or nothing where there are none."""
        self._is_due = self._is_due or bool(self._rows)
        for step, unit in self._rows:
            row = (unit.gnmr, unit.delta_gnmr, unit.score, unit.lock, unit.reason)
            self._table.add_data(step, unit.unit, *row)
        self._rows = []
        return {TABLE: self._table} if self._is_due else {}

    def sent(self) -> None:
        """The last part was taken; until then it is part of the next one."""
        self._is_due = False


def pictures(matrix: RiskMatrix) -> dict[str, wandb.Image | CustomChart]:
    """What to log of the last steps: a heat map, and bars of the riskiest and of the recovered units."""
    import wandb

    highest = np.nan_to_num(matrix.gnmr, nan=LONGEST_BAR).max(axis=0).clip(max=LONGEST_BAR)
    return {
        "control/heat_map": wandb.Image(draw_heat_map(matrix), file_type="png"),
        "control/riskiest_units": _bars(matrix, highest, "highest GNMR"),
        "control/recovered_units": _bars(
            matrix, matrix.recovered.sum(axis=0), "steps on the recovery path"
        ),
    }


def log_checkpoint(run: wandb.Run, event: CheckpointEvent) -> None:
    """Log where a checkpoint lies; nothing is read or uploaded but names and sizes of its files."""
    import wandb

    path = Path(event.path).resolve()
    artifact = wandb.Artifact(
        f"checkpoint-{run.id}",
        type="checkpoint",
        metadata={"step": event.step, "kind": event.kind, "bytes": event.bytes, "path": str(path)},
    )
    artifact.add_reference(path.as_uri(), checksum=False, max_objects=MAX_FILES)
    run.log_artifact(artifact, aliases=["latest", f"step-{event.step}"])


def log_report(run: wandb.Run, report: Path) -> None:
    """Upload a report; W&B takes a copy of the file at once."""
    import wandb

    artifact = wandb.Artifact(f"report-{run.id}", type="report")
    artifact.add_file(str(report))
    run.log_artifact(artifact)


def _bars(
    matrix: RiskMatrix, values: np.ndarray[tuple[int], np.dtype[np.float32]], name: str
) -> CustomChart:
    import wandb

    longest = [
        index for index in np.argsort(-values, kind="stable")[:NUM_BARS] if values[index] > 0
    ]
    rows = [[short_unit(matrix.units[index]), float(values[index])] for index in longest]
    table = wandb.Table(columns=["unit", name], data=rows)
    title = f"{name}, steps {matrix.steps[0]} to {matrix.steps[-1]}"
    return wandb.plot.bar(table, "unit", name, title=title)
