"""Figures of a suite's runs: one row a run, one line an arm with means and 95 % intervals."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from gnmr_megatron.analysis.experiments.correlation import Correlation
from gnmr_megatron.analysis.experiments.detection import Detection, detection
from gnmr_megatron.analysis.experiments.matrix import PlannedRun
from gnmr_megatron.analysis.experiments.suite import Suite
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.observability.events import FinishEvent, StepEvent
from gnmr_megatron.observability.spikes import SpikeDetector
from gnmr_megatron.observability.summary import summarize

# two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL95 = 1.96


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


def figures_of(run: PlannedRun, *, kept_bytes: float) -> RunFigures:
    """Read a run that is done.

    Args:
        run: of the suite.
        kept_bytes: what its settings keep of a token at most.
    """
    recorded, summary = RecordedRun(run.folder), summarize(run.folder)
    steps = list(recorded.events_of(StepEvent))
    finish = list(recorded.events_of(FinishEvent))[-1]
    losses = [event.loss for event in steps]
    spikes = SpikeDetector()
    has_diverged = finish.reason != "completed" or summary.held_out_loss is None
    allowed = sum(event.max_recovered or 0 for event in steps[:-1])
    found = detection(recorded) if recorded.starts[0].mode != "disabled" else Detection.nothing()
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
        quantile = _T95[len(numbers) - 2] if len(numbers) - 2 < len(_T95) else _NORMAL95
        return cls(
            mean, quantile * statistics.stdev(numbers) / math.sqrt(len(numbers)), len(numbers)
        )

    def text(self, digits: int) -> str:
        """`4.53 ± 0.02`; the mean alone where there is one value; `-` without any."""
        if math.isnan(self.mean):
            return "-"
        if math.isnan(self.half_width):
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.half_width:.{digits}f}"


@dataclass(frozen=True)
class ArmFigures:
    """What came out of an arm.

    Attributes:
        arm: its name.
        runs: number of runs.
        diverged: how many of them diverged.
        values: interval of each figure of `RunFigures` that is a number.
        gap_closed: of the held-out losses, paired by seed; None where there is no gap at this size.
        regret: held-out loss above the oracle's, paired by seed.
        step_time_ratio: of the high arm's, paired by seed.
    """

    arm: str
    runs: int
    diverged: int
    values: Mapping[str, Interval]
    gap_closed: Interval | None
    regret: Interval
    step_time_ratio: Interval


@dataclass(frozen=True)
class Gap:
    """What there is to gain: held-out loss of the low path above that of the high path, paired by seed.

    Attributes:
        difference: the gap and its interval.
        exists: whether the low path is worse beyond doubt: with several seeds, the whole interval above 0.
    """

    difference: Interval
    exists: bool

    @classmethod
    def of(cls, low: Mapping[int, float], high: Mapping[int, float]) -> Gap:
        """Of the losses of two arms by seed."""
        difference = Interval.of(low[seed] - high[seed] for seed in low.keys() & high.keys())
        width = 0.0 if math.isnan(difference.half_width) else difference.half_width
        return cls(difference, difference.mean - width > 0)

    def words(self, suite: Suite) -> str:
        """A sentence for the reader of the table."""
        size = self.difference.text(3)
        if math.isnan(self.difference.mean):
            return f"The gap between {suite.low} and {suite.high} is not known: runs are missing or diverged."
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
    numbers = [f.name for f in fields(RunFigures) if f.name not in ("arm", "seed", "finished")]
    found = []
    for name in suite.arms:
        own = [row for row in rows if row.arm == name]
        if not own:
            continue
        closed = (
            Interval.of(
                (low[row.seed] - row.held_out_loss) / (low[row.seed] - high[row.seed])
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
                step_time_ratio=Interval.of(
                    row.step_seconds / times[row.seed] for row in own if row.seed in times
                ),
            )
        )
    return gap, found


def as_csv(rows: Sequence[RunFigures]) -> str:
    """One line a run."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(RunFigures)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


_COLUMNS = (
    ("held-out loss", "held_out_loss", 3),
    ("spikes", "spikes", 1),
    ("recovered unit-steps", "recovered_unit_steps", 0),
    ("budget used", "budget_used", 2),
    ("exceedance %", "exceedance_rate", 2),
    ("switches / 1,000 steps", "switches", 0),
    ("kept bytes a token", "kept_bytes", 0),
)
_FAULT_COLUMNS = (
    ("hit rate", "hit_rate", 2),
    ("false %", "false_rate", 2),
    ("delay", "detection_delay", 1),
)


def as_markdown(suite: Suite, gap: Gap, arms: Sequence[ArmFigures]) -> str:
    """A table with means and 95 % intervals, and what to make of it."""
    has_faults = any(not math.isnan(arm.values["hit_rate"].mean) for arm in arms)
    columns = [*_COLUMNS, *(_FAULT_COLUMNS if has_faults else ())]
    heads = [
        "arm",
        "runs",
        *(head for head, _, _ in columns),
        "gap closed",
        "above oracle",
        "step time",
    ]
    lines = [f"# {suite.name}", "", suite.question, "", gap.words(suite), ""]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for arm in arms:
        runs = f"{arm.runs}" + (f" ({arm.diverged} diverged)" if arm.diverged else "")
        cells = [arm.arm, runs]
        for _, key, digits in columns:
            scale = 100.0 if key in ("exceedance_rate", "false_rate") else 1.0
            value = arm.values[key]
            cells.append(
                Interval(scale * value.mean, scale * value.half_width, value.count).text(digits)
            )
        cells.append("no gap" if arm.gap_closed is None else arm.gap_closed.text(2))
        cells += [arm.regret.text(3), arm.step_time_ratio.text(2)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Means and 95 % intervals over seeds (Student's t). Step times are of runs that shared a machine: ratios of "
        f"medians to {suite.high}, and no more than a hint. Gap closed = (low - arm) / (low - high) of held-out "
        "losses; above oracle: held-out loss above that of the oracle at the same budget.",
        "",
    ]
    return "\n".join(lines)


def ranking_as_markdown(
    ranking: Mapping[str, Mapping[str, tuple[Correlation, Correlation]]],
) -> str:
    """How scores rank units against their measured recovery gaps, for each run that measured any; else empty."""
    if not ranking:
        return ""
    lines = [
        "## Do scores find the units that recovery helps most?",
        "",
        "Spearman's rank correlation, over units, of each score with the measured recovery gap (the error of the "
        "gradient that recovering the unit removes on the batch): mean over measurements and 95 % interval of a block "
        "bootstrap. A decision takes effect in the step after.",
        "",
        "| run | score | gap of the same step | gap of the step after | measurements |",
        "|---|---|---|---|---|",
    ]
    for run, scores in ranking.items():
        for name, (same, after) in scores.items():
            lines.append(f"| {run} | {name} | {same.text()} | {after.text()} | {same.count} |")
    return "\n".join([*lines, ""])


def as_json(suite: Suite, gap: Gap, arms: Sequence[ArmFigures]) -> dict[str, object]:
    """Plain values: the gap, means by arm, and on top how the suite's subject answered injected faults."""

    def number(value: float) -> float | None:
        return value if np.isfinite(value) else None

    keys = ("hit_rate", "false_rate", "detection_delay")
    subject = next((arm for arm in arms if arm.arm == suite.subject), None)
    return {
        **({key: number(subject.values[key].mean) for key in keys} if subject else {}),
        "gap": number(gap.difference.mean),
        "gap_exists": gap.exists,
        "arms": {
            arm.arm: {
                **{key: number(value.mean) for key, value in arm.values.items()},
                "runs": arm.runs,
                "diverged": arm.diverged,
                "gap_closed": None if arm.gap_closed is None else number(arm.gap_closed.mean),
                "regret": number(arm.regret.mean),
                "step_time_ratio": number(arm.step_time_ratio.mean),
            }
            for arm in arms
        },
    }
