"""Loss spikes, and what the controller did before and after them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnmr_megatron.analysis.report.history import RunHistory, StepSeries

AROUND = 10  # steps before and after that are looked at


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step whose loss is above the mean of the steps before it and 6 standard deviations.

    Attributes:
        step: the step.
        loss: its loss.
        bound: what a loss may be.
        over_before: unit-steps over a threshold in the AROUND steps before it, without itself.
        recovered_before: unit-steps on the recovery path in them.
        over_at: units over a threshold in the step itself.
        score_at: highest score in it.
        selected_at: ids of the units that its decision selected, for the next step.
        recovered_after: unit-steps on the recovery path in the AROUND steps after it.
        steps_to_return: steps until the loss is within `bound` again; None where it was not, as far as the run goes.
    """

    step: int
    loss: float
    bound: float
    over_before: int
    recovered_before: int
    over_at: int
    score_at: float
    selected_at: tuple[str, ...]
    recovered_after: int
    steps_to_return: int | None


def find_spikes(history: RunHistory) -> tuple[Spike, ...]:
    """All spikes of a run, in order."""
    series = history.series
    rows = np.flatnonzero(np.isfinite(series.loss) & (series.loss > series.spike_bound))
    return tuple(_spike(history, int(row)) for row in rows)


def _spike(history: RunHistory, row: int) -> Spike:
    series, selections = history.series, history.selections
    before, after = slice(max(row - AROUND, 0), row), slice(row + 1, row + 1 + AROUND)
    step, bound = int(series.step[row]), float(series.spike_bound[row])
    chosen = slice(*np.searchsorted(selections.step, [step, step + 1]))
    return Spike(
        step=step,
        loss=float(series.loss[row]),
        bound=bound,
        over_before=int(series.over_threshold[before].sum()),
        recovered_before=int(series.recovered[before].sum()),
        over_at=int(series.over_threshold[row]),
        score_at=float(series.riskiest_score[row]),
        selected_at=tuple(history.units[unit] for unit in selections.unit[chosen].tolist()),
        recovered_after=int(series.recovered[after].sum()),
        steps_to_return=_steps_to_return(series, row, bound),
    )


def _steps_to_return(series: StepSeries, row: int, bound: float) -> int | None:
    for later in range(row + 1, len(series)):
        if series.loss[later] <= bound:
            return int(series.step[later] - series.step[row])
    return None
