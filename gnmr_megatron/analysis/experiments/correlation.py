"""Whether scores rank units as their measured recovery gaps do: Spearman's correlation over units, over training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.config import ControlConfig, PolicyName
from gnmr_megatron.control.controller import Controller

Floats = NDArray[np.float64]

POLICIES: tuple[PolicyName, ...] = ("gnmr", "ema_ratio", "zscore")
RESAMPLES = 1000


@dataclass(frozen=True)
class Correlation:
    """Mean over measurements, and its 95 % interval by a block bootstrap, since neighbouring steps are alike.

    Attributes:
        mean: in [-1, 1]; NaN without a measurement.
        low: lower end of the interval.
        high: upper end.
        count: measurements.
    """

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Floats) -> Correlation:
        """Of one correlation a measurement, in the order of steps; NaN where units could not be ranked."""
        values = values[np.isfinite(values)]
        count = len(values)
        if count == 0:
            return cls(math.nan, math.nan, math.nan, 0)
        block = max(1, round(count ** (1 / 3)))  # the usual length for a mean
        starts = np.random.default_rng(0).integers(
            0, count - block + 1, size=(RESAMPLES, math.ceil(count / block))
        )
        samples = values[(starts[..., None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count]]
        low, high = np.quantile(samples.mean(axis=1), [0.025, 0.975])
        return cls(float(values.mean()), float(low), float(high), count)

    def text(self) -> str:
        """`0.31 [0.25, 0.37]`."""
        return "-" if not self.count else f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def correlations(run: RecordedRun) -> dict[str, tuple[Correlation, Correlation]]:
    """By score: with the gap of the same step, and of the step after it, which is what a decision is for.

    Empty where nothing was measured.
    """
    gaps = {step: np.array(values) for step, values in run.recovery_gaps.items()}
    if not gaps:
        return {}
    rows = {int(step): row for row, step in enumerate(run.matrix.steps)}
    return {
        name: (_over_training(scores, gaps, rows, lag=0), _over_training(scores, gaps, rows, lag=1))
        for name, scores in _scores(run)
    }


def _over_training(
    scores: Floats, gaps: Mapping[int, Floats], rows: Mapping[int, int], *, lag: int
) -> Correlation:
    found = [
        spearman(scores[rows[step - lag]], gap) for step, gap in gaps.items() if step - lag in rows
    ]
    return Correlation.of(np.array(found))


def _scores(run: RecordedRun) -> Iterator[tuple[str, Floats]]:
    """[steps, units] of each score, from the recorded norms."""
    matrix = run.matrix
    yield "norm", matrix.norms
    yield "GNMR", matrix.gnmr.astype(np.float64)
    yield "delta-GNMR", matrix.delta_gnmr.astype(np.float64)
    for policy in POLICIES:
        config = ControlConfig(policy=policy, mode="monitor", warmup_steps=0)
        controller = Controller(config, run.units)
        scores = [
            controller.decide(norms, step=int(step), updated=bool(updated)).score
            for step, norms, updated in zip(matrix.steps, matrix.norms, matrix.updated, strict=True)
        ]
        yield f"score of {policy}", np.array(scores)


def spearman(first: Floats, second: Floats) -> float:
    """Pearson's correlation of ranks, ties with their mean rank; NaN where one of the two is constant."""
    ranks = [_ranks(values) for values in (first, second)]
    if any(np.ptp(values) == 0 for values in ranks):
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts).astype(np.float64)
    mean: Floats = (last - (counts - 1) / 2)[inverse]
    return mean
