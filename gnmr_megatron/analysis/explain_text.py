"""An explained step in a table and in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.analysis.explain import ExplainedStep, ExplainedUnit
from gnmr_megatron.observability.console import short_unit

MOST_ROWS = 12
MOST_SENTENCES = 8


def print_step(
    console: Console, step: ExplainedStep, chosen: Sequence[ExplainedUnit] | None = None
) -> None:
    """Print a step: the chosen units, or those that had a part in it and the riskiest others."""
    console.print(headline(step), soft_wrap=True, markup=False)
    shown = _with_a_part(step) if chosen is None else list(chosen)
    console.print(_table(step, shown))
    if chosen is None and len(shown) < len(step.units):
        rest = len(step.units) - len(shown)
        console.print(f"{rest} more units, with lower scores: --unit '*' shows all", markup=False)
    told = step.candidates if chosen is None else shown
    for unit in told[:MOST_SENTENCES]:
        console.print(sentence(step, unit), soft_wrap=True, markup=False)
    if not told:
        console.print(_nobody(step), soft_wrap=True, markup=False)
    if not step.as_recorded:
        console.print(
            "Careful: the run recorded another decision; `gnmr-megatron replay RUN` tells where they part.",
            soft_wrap=True,
        )


def headline(step: ExplainedStep) -> str:
    """The step and the settings in force."""
    parts = [f"step {step.step} of {step.run}", f"policy {step.policy} ({step.mode})"]
    parts += [f"alpha {step.alpha:.4g}", f"beta {step.beta:.4g}", f"delta {step.delta}"]
    parts += [f"budget {step.max_recovered}", f"lock {step.lock_steps}"]
    if step.is_warming_up:
        parts.append("warming up")
    if not step.updated:
        parts.append("the optimizer skipped this step, so nothing of it is remembered")
    return ", ".join(parts)


def _with_a_part(step: ExplainedStep) -> list[ExplainedUnit]:
    shown = step.candidates
    shown += [unit for unit in step.units if unit.rank is None and unit.recovered]
    others = [unit for unit in step.units if unit.rank is None and not unit.recovered]
    others.sort(key=lambda unit: -unit.score)
    return shown + others[: max(MOST_ROWS - len(shown), 0)]


def _table(step: ExplainedStep, units: Sequence[ExplainedUnit]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    table.add_column("order", justify="right")
    table.add_column("unit", no_wrap=True)
    for name in (
        "norm",
        "mean before",
        "GNMR",
        f"mean of last {step.delta}",
        "delta-GNMR",
        "score",
    ):
        table.add_column(name, justify="right")
    table.add_column("decision")
    table.add_column("because of")
    table.add_column("lock", justify="right")
    table.add_column("in this step")
    for unit in units:
        numbers = (unit.norm, unit.mean, unit.gnmr, unit.recent_mean, unit.delta_gnmr, unit.score)
        table.add_row(
            "" if unit.rank is None else str(unit.rank),
            short_unit(unit.unit),
            *("-" if number is None else f"{number:.4g}" for number in numbers),
            unit.outcome,
            unit.reason or "",
            f"{unit.lock_before} -> {unit.lock_after}",
            "recovered" if unit.recovered else "",
            style={"selected": "yellow", "cut": "red"}.get(unit.outcome),
        )
    return table


def sentence(step: ExplainedStep, unit: ExplainedUnit) -> str:
    """Why a unit was selected, or not."""
    name = short_unit(unit.unit)
    if unit.outcome == "selected":
        runs = "runs" if step.mode == "active" else "would run (gnmr.mode: monitor)"
        text = (
            f"{name} is selected, {unit.rank} of {len(step.candidates)}: {_why(step, unit)}. It {runs} step "
            f"{step.step + 1} on the recovery path"
        )
        if unit.lock_after:
            text += f" and stays a candidate for {_steps(unit.lock_after)} after it"
    elif unit.outcome == "cut":
        first = [short_unit(other.unit) for other in step.candidates if other.outcome == "selected"]
        text = (
            f"{name} is not selected: {_why(step, unit)}, but the budget of {step.max_recovered} "
        )
        text += f"goes to {', '.join(first)}" if first else "has no place"
    else:
        text = f"{name} is no candidate: {_why_not(step, unit)}"
    return text + (". It ran on the recovery path in this step." if unit.recovered else ".")


def _why(step: ExplainedStep, unit: ExplainedUnit) -> str:
    return {
        "gnmr": f"its norm is {unit.gnmr:.3g} times the mean of those before (GNMR, above alpha {step.alpha:.4g})",
        "delta_gnmr": f"its GNMR is {unit.delta_gnmr:.3g} times the mean of its last {step.delta} (delta-GNMR, above "
        f"beta {step.beta:.4g})",
        "collapse": f"its norm has fallen to {unit.gnmr:.3g} of the mean of those before, below gnmr.collapse_ratio",
        "non_finite": "its gradient norm is not finite",
        "policy": f"policy {step.policy} scores it {unit.score:.3g}, above 1",
        "lock": f"it was risky before and is locked for {_steps(unit.lock_before)} (its score, {unit.score:.3g}, is "
        "not above 1)",
    }[unit.reason or "policy"]


def _why_not(step: ExplainedStep, unit: ExplainedUnit) -> str:
    if step.is_warming_up:
        return "the step is in the warm-up (gnmr.warmup_steps), which only builds history"
    if step.policy != "gnmr":
        return f"policy {step.policy} scores it {unit.score:.3g}, not above 1"
    text = f"GNMR {unit.gnmr:.3g} is not above alpha {step.alpha:.4g}"
    if unit.recent_mean is None:
        return f"{text}, and there are fewer than {step.delta} GNMR values for delta-GNMR yet"
    return f"{text}, nor delta-GNMR {unit.delta_gnmr:.3g} above beta {step.beta:.4g}"


def _nobody(step: ExplainedStep) -> str:
    if not step.units:
        return "The run has no units."
    riskiest = max(step.units, key=lambda unit: unit.score)
    return f"No unit is a candidate. The riskiest: {sentence(step, riskiest)}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
