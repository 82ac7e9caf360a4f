"""TensorBoard files: the scalars of each step, and a histogram of GNMR over the units."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.dashboards.risk_window import RiskWindow
from gnmr_megatron.observability.dashboards.scalars import evaluation_scalars, step_scalars
from gnmr_megatron.observability.events import EvaluationEvent, Event, StartEvent, StepEvent

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter  # type: ignore[import-untyped]  # it has no types

FOLDER = "tensorboard"
FLUSH_SECONDS = 10
HISTOGRAM_INTERVAL = 10


class TensorBoardTracker:
    """Writes RUN/tensorboard; a resumed run hides what it had of the steps that it takes again.

    Args:
        folder: run folder.
        config: which units' ratios are wanted.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed; says what to do.
    """

    def __init__(self, folder: Path, config: TrackingConfig) -> None:
        try:
            import tensorboardX  # noqa: F401 - whether it is there is told at once
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tracking.tensorboard needs tensorboardX: pip install tensorboardX"
            ) from error
        self._folder = folder
        self._risk = RiskWindow(folder, config.unit_metrics)
        self._writer: SummaryWriter | None = None

    def record(self, event: Event) -> None:
        """Write what belongs on a dashboard."""
        if isinstance(event, StartEvent):
            self._writer = _open(self._folder, event)
        elif isinstance(event, StepEvent):
            self._scalars({**step_scalars(event), **self._risk.scalars(event.step)}, event)
            if event.step % HISTOGRAM_INTERVAL == 0:
                self._histogram(event)
        elif isinstance(event, EvaluationEvent):
            self._scalars(evaluation_scalars(event), event)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, values: Mapping[str, float], event: Event) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, event.step, walltime=event.time)

    def _histogram(self, event: StepEvent) -> None:
        row = self._risk.up_to(event.step, num_steps=1)
        if row is not None and self._writer is not None:
            finite = row.gnmr[np.isfinite(row.gnmr)]
            if finite.size:
                self._writer.add_histogram("control/gnmr", finite, event.step, walltime=event.time)


def _open(folder: Path, start: StartEvent) -> SummaryWriter:
    from tensorboardX import SummaryWriter

    return SummaryWriter(
        logdir=str(folder / FOLDER),
        purge_step=start.step if (folder / FOLDER).exists() else None,
        flush_secs=FLUSH_SECONDS,
        filename_suffix=f".{start.step:08d}",  # a resume within the second would get the same name
    )
