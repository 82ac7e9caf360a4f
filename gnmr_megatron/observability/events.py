"""What happens in a run: one frozen dataclass an event, one JSON line each."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from gnmr_megatron.errors import DataError

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Anything that happened; `step` is the optimizer step that it belongs to."""

    name: ClassVar[str]

    step: int
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """A run starts, or goes on; `step` is the first one that it will take."""

    name: ClassVar[str] = "start"

    run: str
    resumed_from: str | None
    world_size: int
    layout: dict[str, Any]
    num_units: int
    max_recovered: int
    total_steps: int
    policy: str
    mode: str
    environment: dict[str, str]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """An optimizer step.

    `tokens` counts the run so far, `recovered` holds the unit ids on the recovery path in this very step, and
    `updated` tells whether the weights changed.
    """

    name: ClassVar[str] = "step"

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    control_seconds: float
    recovered: list[str]
    updated: bool
    over_threshold: int
    """Units with a score above 1, whether or not the budget let them in."""
    riskiest_unit: str | None
    riskiest_score: float


@dataclass(frozen=True, kw_only=True)
class SelectedUnit:
    """A unit that a decision put on the recovery path of the next step, and why."""

    unit: str
    gnmr: float
    delta_gnmr: float
    score: float
    lock: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class DecisionEvent(Event):
    """A recovery set that is not empty, or became so; in force from step + 1."""

    name: ClassVar[str] = "decision"

    selected: list[SelectedUnit]


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is complete; `kind` is periodic, signal or final."""

    name: ClassVar[str] = "checkpoint"

    path: str
    seconds: float
    bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Event):
    """Loss on held-out text, in nats a token."""

    name: ClassVar[str] = "evaluation"

    loss: float
    perplexity: float
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FaultEvent(Event):
    """Something went wrong and was survived; `rank` is null where it concerns all."""

    name: ClassVar[str] = "fault"

    kind: str
    rank: int | None
    units: list[str]
    message: str


@dataclass(frozen=True, kw_only=True)
class FinishEvent(Event):
    """A run ends; `reason` is completed, signal or diverged."""

    name: ClassVar[str] = "finish"

    reason: str
    loss: float
    seconds: float
    tokens: int


EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        StartEvent,
        StepEvent,
        DecisionEvent,
        CheckpointEvent,
        EvaluationEvent,
        FaultEvent,
        FinishEvent,
    )
}


def to_line(event: Event) -> str:
    """One line of strict JSON; NaN and infinities become the strings "nan", "inf" and "-inf"."""
    record = {"event": event.name, **dataclasses.asdict(event)}
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def from_line(line: str) -> Event:
    """The event of a line.

    Raises:
        ValueError: the line is not JSON, of an unknown event, or lacks a field.
    """
    record = json.loads(line)
    try:
        kind = EVENTS[record.pop("event")]
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError("no known event") from error
    if kind is DecisionEvent:
        record["selected"] = [
            SelectedUnit(**_floats(unit, SelectedUnit)) for unit in record["selected"]
        ]
    try:
        return kind(**_floats(record, kind))
    except TypeError as error:
        raise ValueError(str(error)) from error


def read_events(path: Path) -> Iterator[Event]:
    """Events of a file in order; a last line that is still being written is left out.

    Raises:
        DataError: a line is broken or of another version; names file and line.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield from_line(line)
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: is no event that this version knows: {error}"
                ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _floats(record: dict[str, Any], kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {
        key: float(value) if hints.get(key) is float and isinstance(value, str | int) else value
        for key, value in record.items()
    }
