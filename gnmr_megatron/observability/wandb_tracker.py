"""Weights & Biases: scalars each step; at intervals the recovery sets, a heat map and bar charts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.event_log import FILE
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    DecisionEvent,
    EvaluationEvent,
    Event,
    EventReader,
    FinishEvent,
    StartEvent,
    StepEvent,
)
from gnmr_megatron.observability.risk_window import RiskWindow
from gnmr_megatron.observability.scalars import evaluation_scalars, step_scalars
from gnmr_megatron.observability.wandb_media import (
    RecoveryTable,
    heat_map,
    log_checkpoint,
    log_report,
    recovered_chart,
    riskiest_chart,
)
from gnmr_megatron.observability.wandb_run import close_run, last_step_in_wandb, open_run

if TYPE_CHECKING:
    import wandb

MAX_PARTS = 90  # W&B shows the newest 100 parts of a table
MAX_WINDOW = 900  # steps of a heat map


class WandbTracker:
    """One W&B run for one run folder, on which a resumed run goes on. W&B's step is the optimizer step.

    W&B takes no step back: those that a resume takes again keep what was sent the first time, and those that a crash
    kept from it are sent out of the run folder.

    W&B is imported and started by the first event, so that whatever it raises goes through the TrackerGroup.

    Args:
        folder: run folder; W&B's files go to its `wandb` folder.
        config: W&B settings.
        run_config: all settings of the run, shown as the W&B config.
    """

    def __init__(
        self, folder: Path, config: TrackingConfig, *, run_config: Mapping[str, Any]
    ) -> None:
        self._folder, self._config, self._run_config = folder, config, run_config
        self._run: wandb.Run | None = None
        self._interval = config.wandb_table_interval
        self._step = self._last_sent = 0  # the newest, and the last one that W&B had at the start

    def record(self, event: Event) -> None:
        """Log what belongs on a dashboard."""
        if self._run is None:
            self._run = open_run(self._folder, self._config, self._run_config)
            self._risk = RiskWindow(self._folder, self._config.unit_metrics)
            self._table = RecoveryTable()
        if isinstance(event, StartEvent):
            self._start(self._run, event)
        elif isinstance(event, CheckpointEvent) and self._config.wandb_checkpoints:
            log_checkpoint(self._run, event)
        elif isinstance(event, FinishEvent):
            self._run.summary["finish_reason"] = event.reason
        else:
            self._log(self._run, event)

    def close(self) -> None:
        """Send what is left and end the W&B run."""
        if self._run is not None:
            self._send_interval(self._run)
            if self._config.wandb_report:
                log_report(self._run, self._folder)
            close_run(self._run)

    def _start(self, run: wandb.Run, event: StartEvent) -> None:
        """Take up where W&B is, which after a crash may be before or behind the checkpoint."""
        self._interval = max(self._interval, math.ceil(event.total_steps / MAX_PARTS))
        last = last_step_in_wandb(run, self._folder)
        self._last_sent = event.step - 1 if last is None else last
        if self._last_sent < event.step - 1:
            kinds = (StepEvent.name, DecisionEvent.name, EvaluationEvent.name)
            for missed in EventReader(self._folder / FILE, only=kinds):
                self._log(run, missed)

    def _log(self, run: wandb.Run, event: Event) -> None:
        if event.step <= self._last_sent:
            return
        if isinstance(event, StepEvent):
            if self._step and self._step % self._interval == 0:
                self._send_interval(run)  # now that the decision of that step is there, too
            self._step = event.step
            run.log({**step_scalars(event), **self._risk.scalars(event.step)}, step=event.step)
        elif isinstance(event, DecisionEvent):
            self._table.add(event)
        elif isinstance(event, EvaluationEvent):
            run.log(evaluation_scalars(event), step=event.step)

    def _send_interval(self, run: wandb.Run) -> None:
        """Log the decisions that are new, and pictures of the last steps: once a step, a second part would hide the first."""
        if part := self._table.new_part():
            run.log(part, step=self._step)
        matrix = self._risk.up_to(self._step, num_steps=min(self._interval, MAX_WINDOW))
        if matrix is not None:
            media = {
                "control/heat_map": heat_map(matrix),
                "control/riskiest_units": riskiest_chart(matrix),
                "control/recovered_units": recovered_chart(matrix),
            }
            run.log(media, step=self._step)
