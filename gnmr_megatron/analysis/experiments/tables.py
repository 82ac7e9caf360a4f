"""A suite's figures as CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

import numpy as np

from gnmr_megatron.analysis.experiments.correlation import Correlation
from gnmr_megatron.analysis.experiments.detection import AFTERMATH, WINDOW, Answer, Detection
from gnmr_megatron.analysis.experiments.results import ArmFigures, Gap, Interval, RunFigures
from gnmr_megatron.analysis.experiments.suite import Suite


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
    ("bursts hit %", "burst_hit_rate", 1),
    ("loss after", "excess_loss", 3),
)
_PERCENT = ("exceedance_rate", "false_rate", "burst_hit_rate")


def as_markdown(suite: Suite, gap: Gap, arms: Sequence[ArmFigures]) -> str:
    """A table with means and 95 % intervals, and what to make of it."""
    has_faults = any(not math.isnan(arm.values["hit_rate"].mean) for arm in arms)
    has_budgets = any(arm.budget_of is not None for arm in suite.arms.values())
    columns = [*_COLUMNS, *(_FAULT_COLUMNS if has_faults else ())]
    heads = [
        "arm",
        "runs",
        *(head for head, _, _ in columns),
        "gap closed",
        *(("above its budget's arm",) if has_budgets else ()),
        *(("above oracle",) if suite.oracle is not None else ()),
        "step time",
    ]
    lines = [f"# {suite.name}", "", suite.question, "", gap.words(suite), ""]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for arm in arms:
        runs = f"{arm.runs}" + (f" ({arm.diverged} diverged)" if arm.diverged else "")
        cells = [arm.arm, runs]
        for _, key, digits in columns:
            scale = 100.0 if key in _PERCENT else 1.0
            value = arm.values[key]
            cells.append(
                Interval(scale * value.mean, scale * value.half_width, value.count).text(digits)
            )
        cells.append(gap.verdict if arm.gap_closed is None else arm.gap_closed.text(2))
        if has_budgets:
            cells.append(arm.above_budget.text(3))
        if suite.oracle is not None:
            cells.append(arm.regret.text(3))
        cells.append(arm.step_time_ratio.text(2))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Means and 95 % intervals over seeds (Student's t). Step times are of runs that shared a machine: ratios of "
        f"medians to {suite.high}, and no more than a hint. Gap closed = (low - arm) of held-out losses, paired by "
        "seed, over the mean of (low - high). Above: held-out loss above that of the arm with the same budget, or of "
        "the oracle, paired by seed.",
        "",
    ]
    return "\n".join(lines)


def faults_as_markdown(answers: Mapping[str, Sequence[Answer]]) -> str:
    """How the runs of each arm answered the faults of each kind; empty where there were none."""
    lines = [
        "## Faults, kind by kind",
        "",
        f"Answered: one of its units was selected within {WINDOW} steps; delay 0 is the decision of the same step. "
        f"Norm raised: of the unit, over the mean of the {WINDOW} steps before, median. Loss after: mean training loss "
        f"of the {AFTERMATH} steps from the fault, above that of the arm without faults on the same batches.",
        "",
        "| fault | arm | count | answered % | delay | norm raised | loss after |",
        "|---|---|---|---|---|---|---|",
    ]
    faults = {answer.fault.message for found in answers.values() for answer in found}
    for fault in sorted(faults, key=lambda fault: (fault.split()[0], len(fault), fault)):
        for arm, found in answers.items():
            own = [answer for answer in found if answer.fault.message == fault]
            if own:
                one = Detection(tuple(own), 0, 0)
                known = [answer.raised for answer in own if not math.isnan(answer.raised)]
                raised = statistics.median(known) if known else math.nan
                loss = Interval.of(answer.excess_loss for answer in own).text(3)
                cells = [fault, arm, f"{len(own)}", f"{100 * one.hit_rate:.0f}", f"{one.delay:.1f}",
                         f"{raised:.1f}", loss]  # fmt: skip
                lines.append(f"| {' | '.join(cell.replace('nan', '-') for cell in cells)} |")
    return "\n".join([*lines, ""]) if faults else ""


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

    keys = ("hit_rate", "false_rate", "detection_delay", "burst_hit_rate")
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
                "above_budget": [
                    number(arm.above_budget.mean),
                    number(arm.above_budget.half_width),
                ],
                "step_time_ratio": number(arm.step_time_ratio.mean),
            }
            for arm in arms
        },
    }
