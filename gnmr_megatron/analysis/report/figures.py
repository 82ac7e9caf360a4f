"""The numbers of a run that its report tells in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnmr_megatron.analysis.report.history import RunHistory, StepSeries
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.statistics import IntArray

PAPER_EXCEEDANCE_PERCENT = 0.2
"""Unit-steps over a threshold that the paper reports, of all."""


@dataclass(frozen=True, kw_only=True)
class LossFigures:
    """How the training loss went, by its mean over windows of steps.

    Attributes:
        window: steps in a window.
        first: mean of the first window.
        last: mean of the last window.
        best: lowest mean of a window.
        best_step: last step of that window.
        best_deviation: standard deviation of the single losses in it.
        not_finite: steps whose loss is not finite; windows leave them out.
    """

    window: int
    first: float
    last: float
    best: float
    best_step: int
    best_deviation: float
    not_finite: int


def loss_figures(series: StepSeries) -> LossFigures | None:
    """How the loss went; None without a finite loss."""
    is_finite = np.isfinite(series.loss)
    losses, steps = series.loss[is_finite], series.step[is_finite]
    if not len(losses):
        return None
    window = min(max(8, len(losses) // 50), len(losses))
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    means = (sums[window:] - sums[:-window]) / window
    best = int(np.argmin(means))
    return LossFigures(
        window=window,
        first=float(means[0]),
        last=float(means[-1]),
        best=float(means[best]),
        best_step=int(steps[best + window - 1]),
        best_deviation=float(losses[best : best + window].std()),
        not_finite=int((~is_finite).sum()),
    )


@dataclass(frozen=True, kw_only=True)
class ControlFigures:
    """What control did, over all steps.

    Attributes:
        unit_steps: units times steps taken.
        recovered: unit-steps on the recovery path.
        selected: unit-steps that decisions selected; more than `recovered` where the mode is monitor.
        over_threshold: unit-steps with a score above 1, after the warm-up.
        budget_percent: recovered unit-steps, of those that the budget allowed after the warm-up.
        full_percent: steps with a full budget, of those after the warm-up that had one.
        crowded_steps: steps with more units over a threshold than the budget holds.
        switches_per_1000: changes of a unit's path in 1,000 steps.
        mean_locked: units that hold a lock, mean over steps.
        max_locked: most units that held one.
        time_percent: deciding and switching, of the time of all steps.
    """

    unit_steps: int
    recovered: int
    selected: int
    over_threshold: int
    budget_percent: float
    full_percent: float
    crowded_steps: int
    switches_per_1000: float
    mean_locked: float
    max_locked: int
    time_percent: float

    @property
    def recovered_percent(self) -> float:
        """Unit-steps on the recovery path, of all."""
        return 100 * self.recovered / max(self.unit_steps, 1)

    @property
    def exceedance_percent(self) -> float:
        """Unit-steps over a threshold, of all."""
        return 100 * self.over_threshold / max(self.unit_steps, 1)


def control_figures(
    history: RunHistory, locked: IntArray, control: ControlConfig
) -> ControlFigures:
    """What control did; `locked` is its lock occupancy, `control` the settings of its last attempt."""
    series = history.series
    steps, seconds = len(series), float(series.step_seconds.sum())
    # the first decision after the warm-up is in force one step later
    budgeted = (series.max_recovered > 0) & (series.step > control.warmup_steps + 1)
    recovered, budget = series.recovered[budgeted], series.max_recovered[budgeted]
    return ControlFigures(
        unit_steps=history.start.num_units * steps,
        recovered=int(series.recovered.sum()),
        selected=len(history.selections.step),
        over_threshold=int(series.over_threshold.sum()),
        budget_percent=100 * float(recovered.sum() / budget.sum()) if len(budget) else 0.0,
        full_percent=100 * float((recovered >= budget).mean()) if len(budget) else 0.0,
        crowded_steps=int((series.over_threshold > series.max_recovered).sum()),
        switches_per_1000=1000 * float(series.switches.sum()) / max(steps, 1),
        mean_locked=float(locked.mean()) if steps else 0.0,
        max_locked=int(locked.max()) if steps else 0,
        time_percent=100 * float(series.control_seconds.sum()) / seconds if seconds else 0.0,
    )
