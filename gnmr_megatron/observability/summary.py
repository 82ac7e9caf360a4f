"""What a run did, in a few lines, from its folder."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.console import duration, short_unit
from gnmr_megatron.observability.event_log import FILE, SUPERSEDED
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    EventReader,
    FaultEvent,
    FinishEvent,
    StartEvent,
    StepEvent,
    strict_json,
)
from gnmr_megatron.observability.risk_matrix import MATRIX, UNITS

FILES = ("config.yaml", FILE, SUPERSEDED, MATRIX, UNITS, "checkpoints", "wandb", "tensorboard")


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
        files: what the run folder holds.
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
    files: list[str]


def summarize(folder: Path) -> RunSummary:
    """Read a run folder, also while the run still writes it.

    Raises:
        DataError: there are no events in the folder, or one is broken; names file and line.
    """
    path = folder / FILE
    if not path.exists():
        raise DataError(f"{folder}: is no run folder, it has no {FILE}")
    tally = _Tally()
    for event in EventReader(path):
        tally.add(event)
    start, last = tally.start, tally.last
    if start is None:
        raise DataError(
            f"{path}: has no start event yet; the run is still being set up, or it failed there"
        )
    unit_steps = max(start.num_units * tally.steps, 1)
    control_share = tally.control_seconds / tally.seconds if tally.seconds else 0.0
    return RunSummary(
        run=str(folder),
        finished=tally.finish.reason if tally.finish else None,
        steps=tally.steps,
        tokens=last.tokens if last else 0,
        first_loss=tally.first_loss,
        last_loss=last.loss if last else None,
        held_out_loss=tally.evaluation.loss if tally.evaluation else None,
        perplexity=tally.evaluation.perplexity if tally.evaluation else None,
        num_units=start.num_units,
        recovered_unit_steps=tally.recovered.total(),
        recovered_percent=100 * tally.recovered.total() / unit_steps,
        over_threshold_percent=100 * tally.over_threshold / unit_steps,
        most_recovered=tally.recovered.most_common(5),
        control_percent=100 * control_share,
        seconds=tally.seconds,
        faults=tally.faults,
        checkpoint=tally.checkpoint,
        files=[name for name in FILES if (folder / name).exists()],
    )


@dataclass
class _Tally:
    """What is added up over the events; a long run doesn't fit in memory as a list."""

    start: StartEvent | None = None
    last: StepEvent | None = None
    evaluation: EvaluationEvent | None = None
    finish: FinishEvent | None = None
    checkpoint: str | None = None
    first_loss: float | None = None
    steps: int = 0
    faults: int = 0
    over_threshold: int = 0
    seconds: float = 0.0
    control_seconds: float = 0.0
    recovered: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, StartEvent):
            self.start, self.finish = event, None
        elif isinstance(event, StepEvent):
            self._add_step(event)
        elif isinstance(event, EvaluationEvent):
            self.evaluation = event
        elif isinstance(event, CheckpointEvent):
            self.checkpoint = event.path
        elif isinstance(event, FaultEvent):
            self.faults += 1
        elif isinstance(event, FinishEvent):
            self.finish = event

    def _add_step(self, event: StepEvent) -> None:
        if self.last is None:
            self.first_loss = event.loss
        self.last = event
        self.steps += 1
        self.over_threshold += event.over_threshold
        self.seconds += event.step_seconds
        self.control_seconds += event.control_seconds
        self.recovered.update(event.recovered)


def as_dict(summary: RunSummary) -> dict[str, Any]:
    """Plain values for strict JSON; NaN and infinities are strings, as in events.jsonl."""
    values: dict[str, Any] = strict_json(dataclasses.asdict(summary))
    return values


def render(summary: RunSummary) -> str:
    """A few lines for people."""
    rows = [
        ("run", f"{summary.run} ({summary.finished or 'not finished'})"),
        ("steps", f"{summary.steps:,} ({summary.tokens:,} tokens, {duration(summary.seconds)})"),
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
        ("files", ", ".join(summary.files)),
    ]
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def _change(first: float | None, last: float | None) -> str:
    return "no step yet" if first is None or last is None else f"{first:.4f} -> {last:.4f}"


def _held_out(summary: RunSummary) -> str:
    if summary.held_out_loss is None:
        return "not evaluated"
    return f"loss {summary.held_out_loss:.4f}, perplexity {summary.perplexity:.2f}"
