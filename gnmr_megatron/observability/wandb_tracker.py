"""Weights & Biases: scalars each step, and the recovery set of each step as a table."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr_megatron.observability.append_file import replace_file
from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.events import (
    DecisionEvent,
    EvaluationEvent,
    Event,
    FinishEvent,
    SelectedUnit,
    StartEvent,
    StepEvent,
)

if TYPE_CHECKING:
    import wandb

RUN_ID = "wandb_run_id"
STEP = "step"  # W&B's own step only grows, so a resume would lose the steps that it takes again
TABLE = "control/recovery_set"
COLUMNS: list[str | int] = ["step", "unit", "gnmr", "delta_gnmr", "score", "lock", "reason"]
MAX_TABLE_PARTS = 90  # W&B shows the newest 100
FINISH_SECONDS = 120.0  # without a network W&B would wait for ever; `wandb sync` sends the rest


class WandbTracker:
    """One W&B run for one run folder; a resumed run goes on in it.

    W&B is imported and started by the first event, so that whatever it raises goes through the TrackerGroup.

    Args:
        folder: run folder; W&B's files go to its `wandb` folder.
        config: W&B settings.
        run_config: all settings of the run, shown as the W&B config.
    """

    def __init__(
        self, folder: Path, config: TrackingConfig, *, run_config: Mapping[str, Any]
    ) -> None:
        self._folder, self._config, self._run_config = folder, config, dict(run_config)
        self._run: wandb.Run | None = None
        self._table_interval = config.wandb_table_interval
        self._rows: list[tuple[int, SelectedUnit]] = []
        self._step = 0

    def record(self, event: Event) -> None:
        """Log what belongs on a dashboard."""
        if self._run is None:
            self._run = _open_run(self._folder, self._config, self._run_config)
            self._table = _new_table()
        self._step = event.step
        if isinstance(event, StartEvent):
            parts = math.ceil(event.total_steps / MAX_TABLE_PARTS)
            self._table_interval = max(self._table_interval, parts)
        elif isinstance(event, StepEvent):
            self._run.log({STEP: event.step, **_scalars(event)})
            if event.step % self._table_interval == 0:
                self._send_table(self._run)
        elif isinstance(event, DecisionEvent):
            self._rows += [(event.step, unit) for unit in event.selected]
        elif isinstance(event, EvaluationEvent):
            values = {"eval/loss": event.loss, "eval/perplexity": event.perplexity}
            self._run.log({STEP: event.step, **values})
        elif isinstance(event, FinishEvent):
            self._run.summary["finish_reason"] = event.reason

    def close(self) -> None:
        """Send what is left and end the W&B run."""
        if self._run is not None:
            self._send_table(self._run)
            self._run.finish()
            import wandb

            wandb.teardown()  # finish() doesn't wait for W&B's own process, which writes the offline file

    def _send_table(self, run: wandb.Run) -> None:
        """Log the rows that are new; W&B joins the parts of an incremental table."""
        if not self._rows:
            return
        for step, unit in self._rows:
            row = (unit.gnmr, unit.delta_gnmr, unit.score, unit.lock, unit.reason)
            self._table.add_data(step, unit.unit, *row)
        self._rows = []
        run.log({STEP: self._step, TABLE: self._table})


def _open_run(folder: Path, config: TrackingConfig, run_config: dict[str, Any]) -> wandb.Run:
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # silent from here: else it asks for a key and waits
    run = wandb.init(
        mode=config.wandb_mode,
        dir=str(folder),
        project=config.wandb_project,
        entity=config.wandb_entity,
        name=config.wandb_name or folder.name,
        id=_run_id(folder),
        resume="allow" if config.wandb_mode == "online" else None,
        tags=config.wandb_tags,
        config=run_config,
        settings=wandb.Settings(
            silent=True, console="off", finish_timeout=FINISH_SECONDS, login_timeout=3
        ),
    )
    run.define_metric(STEP, hidden=True)
    run.define_metric("*", step_metric=STEP)
    run.define_metric("eval/loss", step_metric=STEP, summary="min,last")
    return run


def _new_table() -> wandb.Table:
    import wandb

    return wandb.Table(columns=COLUMNS, log_mode="INCREMENTAL")


def _scalars(event: StepEvent) -> dict[str, float]:
    return {
        "train/loss": event.loss,
        "train/grad_norm": event.grad_norm,
        "train/learning_rate": event.learning_rate,
        "train/tokens": event.tokens,
        "train/updated": int(event.updated),
        "perf/tokens_per_second": event.tokens_per_second,
        "perf/step_seconds": event.step_seconds,
        "control/seconds": event.control_seconds,
        "control/recovered": len(event.recovered),
        "control/over_threshold": event.over_threshold,
        "control/riskiest_score": event.riskiest_score,
    }


def _run_id(folder: Path) -> str:
    """The W&B id of the run folder, made once and kept there."""
    path = folder / RUN_ID
    if not path.exists():
        replace_file(path, f"{uuid.uuid4().hex[:8]}\n".encode())
    return path.read_text().strip()
