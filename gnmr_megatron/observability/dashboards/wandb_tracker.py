"""Weights & Biases: scalars each step; at intervals the recovery sets, a heat map and bar charts."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.dashboards.risk_window import RiskWindow
from gnmr_megatron.observability.dashboards.scalars import evaluation_scalars, step_scalars
from gnmr_megatron.observability.dashboards.wandb_media import (
    RecoveryTable,
    log_checkpoint,
    log_report,
    pictures,
)
from gnmr_megatron.observability.dashboards.wandb_run import (
    Progress,
    close_run,
    open_run,
    progress,
    say,
)
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

if TYPE_CHECKING:
    import wandb

    from gnmr_megatron.observability.trackers import ReportWriter

REPORT = "report.html"
MAX_PARTS = 90  # W&B shows the newest 100 parts of a table
MAX_WINDOW = 900  # steps of a heat map
SLOW_SECONDS, PAUSE = 5.0, 10.0


class WandbTracker:
    """One W&B run for one run folder, on which a resumed run goes on. W&B's step is the optimizer step.

    W&B takes no step back: those that a resume takes again keep what was sent the first time, and those that a crash
    kept from it are sent out of the run folder.

    W&B is imported and started by the first event, so that whatever it raises goes through the TrackerGroup.

    Args:
        folder: run folder; W&B's files go to its `wandb` folder.
        config: W&B settings.
        run_config: all settings of the run, shown as the W&B config.
        write_report: writes the report that is uploaded at the end; None for none.
    """

    def __init__(
        self,
        folder: Path,
        config: TrackingConfig,
        *,
        run_config: Mapping[str, Any],
        write_report: ReportWriter | None = None,
    ) -> None:
        self._write_report = write_report
        self._folder, self._config, self._run_config = folder, config, run_config
        self._run: wandb.Run | None = None
        self._interval = config.wandb_table_interval
        self._step = 0  # the newest that was logged
        self._media_after, self._media_failed = 0.0, False
        self._sent = Progress(step=0, table_step=0)  # at the start

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
            if self._step:
                self._send_interval(self._run)
            if self._write_report is not None:
                self._send_report(self._run, self._write_report)
            close_run(self._run)

    def _start(self, run: wandb.Run, event: StartEvent) -> None:
        """Take up where W&B is, which after a crash may be before or behind the checkpoint."""
        self._interval = max(self._interval, math.ceil(event.total_steps / MAX_PARTS))
        before = event.step - 1
        self._sent = progress(run, self._folder) or Progress(step=before, table_step=before)
        if min(self._sent.step, self._sent.table_step) < before:
            kinds = (StepEvent.name, DecisionEvent.name, EvaluationEvent.name)
            for missed in EventReader(self._folder / FILE, only=kinds):
                self._log(run, missed)

    def _log(self, run: wandb.Run, event: Event) -> None:
        if isinstance(event, DecisionEvent) and event.step > self._sent.table_step:
            self._table.add(event)
        elif isinstance(event, StepEvent) and event.step > self._sent.step:
            is_due = self._step > 0 and self._step % self._interval == 0
            if is_due and time.monotonic() > self._media_after:
                self._send_interval(run)  # now that the decision of that step is there, too
            self._step = event.step
            run.log({**step_scalars(event), **self._risk.scalars(event.step)}, step=event.step)
        elif isinstance(event, EvaluationEvent) and event.step > self._sent.step:
            run.log(evaluation_scalars(event), step=event.step)

    def _send_report(self, run: wandb.Run, write_report: ReportWriter) -> None:
        """Upload the report; where it cannot be, the rest of the end goes on."""
        with tempfile.TemporaryDirectory() as place:
            try:
                log_report(run, write_report([self._folder], Path(place) / REPORT))
            except Exception as error:  # noqa: BLE001 - of the report, or of the network
                say(f"W&B gets no report of the run ({type(error).__name__}: {error})")

    def _send_interval(self, run: wandb.Run) -> None:
        """Log the new decisions, and pictures of the last steps; once a step, as another part would hide the first.

        For a table W&B asks its server, which takes 20 s without a network, or fails. Then pictures are left out, and
        intervals that end sooner than ten times that; the scalars go on.
        """
        began = time.monotonic()
        try:
            if part := self._table.new_part():
                run.log(part, step=self._step)
                self._table.sent()
            matrix = self._risk.up_to(self._step, num_steps=min(self._interval, MAX_WINDOW))
            if matrix is not None and time.monotonic() - began < SLOW_SECONDS:
                run.log(pictures(matrix), step=self._step)
        except Exception as error:  # noqa: BLE001 - whatever the network did
            if not self._media_failed:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                say(f"W&B did not take the table and pictures of step {self._step} ({why})")
            self._media_failed = True
        took = time.monotonic() - began
        if took > SLOW_SECONDS:
            self._media_after = time.monotonic() + PAUSE * took
