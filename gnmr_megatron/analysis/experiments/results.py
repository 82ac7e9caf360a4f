"""Figures of a suite's runs: one row a run, one line an arm with means and 95 % intervals."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from gnmr_megatron.analysis.experiments.detection import Detection
from gnmr_megatron.analysis.experiments.planned_run import PlannedRun
from gnmr_megatron.analysis.experiments.suite import Suite
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.observability.events import FinishEvent, StepEvent
from gnmr_megatron.observability.spikes import SpikeDetector
from gnmr_megatron.observability.summary import summarize

# two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom, and of the normal distribution
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What came out of a run.

    Attributes:
        arm: of the suite.
        seed: of the run.
        finished: completed or diverged.
        steps: taken.
        tokens: trained on.
        held_out_loss: last one, nats a token; NaN where the run diverged.
        last_loss: mean training loss of the last tenth of the steps.
        spikes: steps with a loss above the mean of the last 128 and 6 deviations.
        recovered_unit_steps: units on the recovery path, summed over steps.
        recovered_share: of all unit-steps.
        budget_used: of the recovered units that the budget allowed.
        exceedance_rate: unit-steps over a threshold, of all.
        switches: units that changed their path, per 1,000 steps.
        step_seconds: median of the steps after the first tenth.
        kept_bytes: of a token for the weight gradients, at most.
        hit_rate: injected faults that a recovery answered; NaN where there were none.
        false_rate: recoveries that no fault explains, of all unit-steps.
        detection_delay: mean steps from a fault to the decision that answers it.
        burst_hit_rate: faults that raised a unit's gradient norm 3 times or more and were answered in the next step.
        excess_loss: mean training loss of the 20 steps from each fault above that of the high arm, which has none.
    """

    arm: str
    seed: int
    finished: str
    steps: int
    tokens: int
    held_out_loss: float
    last_loss: float
    spikes: int
    recovered_unit_steps: int
    recovered_share: float
    budget_used: float
    exceedance_rate: float
    switches: float
    step_seconds: float
    kept_bytes: float
    hit_rate: float
    false_rate: float
    detection_delay: float
    burst_hit_rate: float
    excess_loss: float


def figures_of(run: PlannedRun, found: Detection, *, kept_bytes: float) -> RunFigures:
    """Read a run that is done.

    Args:
        run: of the suite.
        found: how it answered its faults.
        kept_bytes: what its settings keep of a token at most.
    """
    recorded, summary = RecordedRun(run.folder), summarize(run.folder)
    steps = list(recorded.events_of(StepEvent))
    finish = list(recorded.events_of(FinishEvent))[-1]
    losses = [event.loss for event in steps]
    spikes = SpikeDetector()
    has_diverged = finish.reason != "completed" or summary.held_out_loss is None
    allowed = sum(event.max_recovered or 0 for event in steps[:-1])
    return RunFigures(
        arm=run.arm.name,
        seed=run.seed,
        finished=finish.reason,
        steps=summary.steps,
        tokens=summary.tokens,
        held_out_loss=math.nan if has_diverged else float(summary.held_out_loss or math.nan),
        last_loss=statistics.fmean(losses[-max(1, len(losses) // 10) :]),
        spikes=sum(spikes.add(loss) for loss in losses),
        recovered_unit_steps=summary.recovered_unit_steps,
        recovered_share=summary.recovered_percent / 100,
        budget_used=summary.recovered_unit_steps / allowed if allowed else 0.0,
        exceedance_rate=summary.over_threshold_percent / 100,
        switches=1000 * _switches(steps) / max(len(steps), 1),
        step_seconds=statistics.median(event.step_seconds for event in steps[len(steps) // 10 :]),
        kept_bytes=kept_bytes,
        hit_rate=found.hit_rate,
        false_rate=found.false_rate,
        detection_delay=found.delay,
        burst_hit_rate=found.burst_hit_rate,
        excess_loss=found.excess_loss,
    )


def _switches(steps: Sequence[StepEvent]) -> int:
    """How often a unit changed its path."""
    sets = [frozenset(event.recovered) for event in steps]
    return sum(len(now ^ before) for before, now in itertools.pairwise(sets))


@dataclass(frozen=True)
class Interval:
    """Mean and half width of its 95 % confidence interval (Student's t); NaN width for one value."""

    mean: float
    half_width: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """Of the values that are numbers."""
        numbers = [value for value in values if not math.isnan(value)]
        if not numbers:
            return cls(math.nan, math.nan, 0)
        mean = statistics.fmean(numbers)
        if len(numbers) == 1 or not math.isfinite(mean):
            return cls(mean, math.nan, len(numbers))
        error = statistics.stdev(numbers) / math.sqrt(len(numbers))
        return cls(mean, _students_t(len(numbers) - 1) * error, len(numbers))

    def text(self, digits: int) -> str:
        """`4.53 ± 0.02`; the mean alone where there is one value; `-` without any."""
        if math.isnan(self.mean):
            return "-"
        if math.isnan(self.half_width):
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.half_width:.{digits}f}"


def _students_t(freedom: int) -> float:
    """Quantile of 97.5 %; beyond the table by Cornish and Fisher's expansion, right to 1e-4 there."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _NORMAL95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms)))


@dataclass(frozen=True)
class ArmFigures:
    """What came out of an arm.

    Attributes:
        arm: its name.
        runs: number of runs.
        diverged: how many of them diverged.
        values: interval of each figure of `RunFigures` that is a number.
        gap_closed: how far the held-out loss is below the low path's, paired by seed, as a share of the mean gap; None
            where there is no gap at this size.
        regret: held-out loss above the oracle's, paired by seed.
        above_budget: held-out loss above that of the arm whose budget it takes, paired by seed.
        step_time_ratio: of the high arm's, paired by seed.
    """

    arm: str
    runs: int
    diverged: int
    values: Mapping[str, Interval]
    gap_closed: Interval | None
    regret: Interval
    above_budget: Interval
    step_time_ratio: Interval


@dataclass(frozen=True)
class Gap:
    """What there is to gain: held-out loss of the low path above that of the high path, paired by seed.

    Attributes:
        difference: the gap and its interval.
        verdict: `worse`: the low path's loss is above beyond doubt, the whole interval above 0, so shares of the gap
            mean something; `no gap`; `low diverged` where the high path did not; `unknown` without two seeds.
    """

    difference: Interval
    verdict: Literal["worse", "no gap", "low diverged", "unknown"]

    @property
    def exists(self) -> bool:
        """Whether there is a gap to take shares of."""
        return self.verdict == "worse"

    @classmethod
    def of(cls, low: Mapping[int, float], high: Mapping[int, float]) -> Gap:
        """Of the losses of two arms by seed; NaN for a run that diverged."""
        both = low.keys() & high.keys()
        difference = Interval.of(low[seed] - high[seed] for seed in both)
        if any(math.isnan(low[seed]) and not math.isnan(high[seed]) for seed in both):
            return cls(difference, "low diverged")
        if difference.count < 2:
            return cls(difference, "unknown")
        is_worse = difference.mean - difference.half_width > 0
        return cls(difference, "worse" if is_worse else "no gap")

    def words(self, suite: Suite) -> str:
        """A sentence for the reader of the table."""
        size = self.difference.text(3)
        if self.verdict == "low diverged":
            return f"{suite.low} diverged where {suite.high} did not: it is worse, but no share of a gap can be told."
        if self.verdict == "unknown":
            known = f" ({size} nats a token with one seed)" if self.difference.count else ""
            return (
                f"The gap between {suite.low} and {suite.high} is not known{known}: that takes two seeds whose runs of "
                "both arms completed."
            )
        if self.exists:
            return (
                f"{suite.low} ends {size} nats a token above {suite.high}: there is a gap to close."
            )
        return (
            f"{suite.low} is not worse than {suite.high} at this size (difference {size} nats a token): there is "
            "no gap to close, and no share of it is given."
        )


def by_arm(suite: Suite, rows: Sequence[RunFigures]) -> tuple[Gap, list[ArmFigures]]:
    """The gap of a suite, and its arms in the order of the file."""

    def losses(arm: str | None) -> dict[int, float]:
        return {row.seed: row.held_out_loss for row in rows if row.arm == arm}

    low, high = losses(suite.low), losses(suite.high)
    gap = Gap.of(low, high)
    times = {row.seed: row.step_seconds for row in rows if row.arm == suite.high}
    oracle = losses(suite.oracle)
    budgets = {name: losses(arm.budget_of) for name, arm in suite.arms.items()}
    numbers = [f.name for f in fields(RunFigures) if f.name not in ("arm", "seed", "finished")]
    found = []
    for name in suite.arms:
        own = [row for row in rows if row.arm == name]
        if not own:
            continue
        closed = (
            Interval.of(
                (low[row.seed] - row.held_out_loss) / gap.difference.mean
                for row in own
                if row.seed in low.keys() & high.keys()
            )
            if gap.exists
            else None
        )
        found.append(
            ArmFigures(
                arm=name,
                runs=len(own),
                diverged=sum(row.finished == "diverged" for row in own),
                values={
                    key: Interval.of(float(getattr(row, key)) for row in own) for key in numbers
                },
                gap_closed=closed,
                regret=Interval.of(
                    row.held_out_loss - oracle[row.seed] for row in own if row.seed in oracle
                ),
                above_budget=Interval.of(
                    row.held_out_loss - budgets[name][row.seed]
                    for row in own
                    if row.seed in budgets[name]
                ),
                step_time_ratio=Interval.of(
                    row.step_seconds / times[row.seed] for row in own if row.seed in times
                ),
            )
        )
    return gap, found
