"""Weights & Biases: scalars each step, and the recovery set of each step as a table."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.events import (
    DecisionEvent,
    EvaluationEvent,
    Event,
    FinishEvent,
    StepEvent,
)

RUN_ID = "wandb_run_id"
COLUMNS: list[str | int] = ["step", "unit", "gnmr", "delta_gnmr", "score", "lock", "reason"]


class WandbTracker:
    """One W&B run for one run folder; a resumed run goes on in it.

    Args:
        folder: run folder; W&B's files go to its `wandb` folder.
        config: W&B settings.
        run_config: all settings of the run, shown as the W&B config.
    """

    def __init__(
        self, folder: Path, config: TrackingConfig, *, run_config: Mapping[str, Any]
    ) -> None:
        self._interval = config.wandb_table_interval
        self._run = wandb.init(
            mode=config.wandb_mode,
            dir=str(folder),
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=folder.name,
            id=_run_id(folder),
            resume="allow" if config.wandb_mode == "online" else None,
            tags=config.wandb_tags,
            config=dict(run_config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("eval/loss", summary="min")
        self._table = wandb.Table(columns=COLUMNS, log_mode="INCREMENTAL")
        self._new_rows = 0

    def record(self, event: Event) -> None:
        """Log what belongs on a dashboard."""
        if isinstance(event, StepEvent):
            self._step(event)
        elif isinstance(event, DecisionEvent):
            for unit in event.selected:
                row = (unit.unit, unit.gnmr, unit.delta_gnmr, unit.score, unit.lock, unit.reason)
                self._table.add_data(event.step, *row)
                self._new_rows += 1
        elif isinstance(event, EvaluationEvent):
            values = {"eval/loss": event.loss, "eval/perplexity": event.perplexity}
            self._run.log(values, step=event.step)
        elif isinstance(event, FinishEvent):
            self._send_table(event.step)
            self._run.summary["finish_reason"] = event.reason

    def close(self) -> None:
        """Send what is left and end the W&B run."""
        self._run.finish()

    def _step(self, event: StepEvent) -> None:
        values = {
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
        self._run.log(values, step=event.step)
        if event.step % self._interval == 0:
            self._send_table(event.step)

    def _send_table(self, step: int) -> None:
        if self._new_rows:
            self._run.log({"control/recovery_set": self._table}, step=step)
            self._new_rows = 0


def _run_id(folder: Path) -> str:
    """The W&B id of the run folder, made once and kept there."""
    path = folder / RUN_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n")
    return path.read_text().strip()
