"""What a run did, in a few lines, from its folder."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.console import short_unit
from gnmr_megatron.observability.event_log import FILE
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    FaultEvent,
    FinishEvent,
    StartEvent,
    StepEvent,
    read_events,
)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Figures of a run.

    Attributes:
        run: run folder.
        finished: why it ended, or None while it runs or after a crash.
        steps: steps taken.
        tokens: tokens trained on.
        first_loss: training loss of the first step, nats a token.
        last_loss: training loss of the last step.
        held_out_loss: last evaluation; None without one.
        perplexity: exp(held_out_loss).
        num_units: recoverable units of the model.
        recovered_unit_steps: sum over steps of units on the recovery path.
        recovered_percent: of all unit-steps.
        over_threshold_percent: unit-steps with a score above 1, of all.
        most_recovered: unit ids and their numbers of recovered steps, at most five.
        control_percent: deciding and switching, of the time of all steps.
        seconds: time of all steps.
        faults: steps or incidents that were survived.
        checkpoint: newest checkpoint, if any.
    """

    run: str
    finished: str | None
    steps: int
    tokens: int
    first_loss: float | None
    last_loss: float | None
    held_out_loss: float | None
    perplexity: float | None
    num_units: int
    recovered_unit_steps: int
    recovered_percent: float
    over_threshold_percent: float
    most_recovered: list[tuple[str, int]]
    control_percent: float
    seconds: float
    faults: int
    checkpoint: str | None


def summarize(folder: Path) -> RunSummary:
    """Read a run folder, also while the run still writes it.

    Raises:
        DataError: there are no events in the folder.
    """
    path = folder / FILE
    if not path.exists():
        raise DataError(f"{folder}: is no run folder, it has no {FILE}")
    start: StartEvent | None = None
    steps: list[StepEvent] = []
    evaluation: EvaluationEvent | None = None
    finish: FinishEvent | None = None
    checkpoint: str | None = None
    faults = 0
    for event in read_events(path):
        if isinstance(event, StartEvent):
            start, finish = event, None
        elif isinstance(event, StepEvent):
            steps.append(event)
        elif isinstance(event, EvaluationEvent):
            evaluation = event
        elif isinstance(event, CheckpointEvent):
            checkpoint = event.path
        elif isinstance(event, FaultEvent):
            faults += 1
        elif isinstance(event, FinishEvent):
            finish = event
    if start is None:
        raise DataError(
            f"{path}: has no start event yet; the run is still being set up, or it failed there"
        )
    recovered = Counter(unit for step in steps for unit in step.recovered)
    unit_steps = max(start.num_units * len(steps), 1)
    seconds = sum(step.step_seconds for step in steps)
    return RunSummary(
        run=str(folder),
        finished=finish.reason if finish else None,
        steps=len(steps),
        tokens=steps[-1].tokens if steps else 0,
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        held_out_loss=evaluation.loss if evaluation else None,
        perplexity=evaluation.perplexity if evaluation else None,
        num_units=start.num_units,
        recovered_unit_steps=recovered.total(),
        recovered_percent=100 * recovered.total() / unit_steps,
        over_threshold_percent=100 * sum(step.over_threshold for step in steps) / unit_steps,
        most_recovered=recovered.most_common(5),
        control_percent=100 * sum(step.control_seconds for step in steps) / seconds
        if seconds
        else 0.0,
        seconds=seconds,
        faults=faults,
        checkpoint=checkpoint,
    )


def as_dict(summary: RunSummary) -> dict[str, Any]:
    """Plain values for JSON."""
    return dataclasses.asdict(summary)


def render(summary: RunSummary) -> str:
    """A few lines for people."""
    rows = [
        ("run", f"{summary.run} ({summary.finished or 'not finished'})"),
        ("steps", f"{summary.steps:,} ({summary.tokens:,} tokens, {summary.seconds:.0f} s)"),
        ("loss", _change(summary.first_loss, summary.last_loss)),
        ("held-out", _held_out(summary)),
        (
            "recovered",
            f"{summary.recovered_unit_steps:,} unit-steps, {summary.recovered_percent:.2f} % of "
            f"{summary.num_units} units x {summary.steps} steps "
            f"({summary.over_threshold_percent:.2f} % over a threshold)",
        ),
        (
            "most often",
            ", ".join(f"{short_unit(u)} ({n})" for u, n in summary.most_recovered) or "none",
        ),
        ("control", f"{summary.control_percent:.3f} % of the step time"),
        ("faults", str(summary.faults) if summary.faults else "none"),
        ("checkpoint", summary.checkpoint or "none"),
    ]
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def _change(first: float | None, last: float | None) -> str:
    return "no step yet" if first is None or last is None else f"{first:.4f} -> {last:.4f}"


def _held_out(summary: RunSummary) -> str:
    if summary.held_out_loss is None:
        return "not evaluated"
    return f"loss {summary.held_out_loss:.4f}, perplexity {summary.perplexity:.2f}"
