"""What happens in a run: one frozen dataclass an event, one JSON line each."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from gnmr_megatron.errors import DataError

SCHEMA_VERSION = 1
NOT_FINITE = ("nan", "inf", "-inf")


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
    num_parameters: int | None = None
    """Of the whole model, over all ranks."""
    control: dict[str, Any] | None = None
    """Settings of the controller from this step on; null in logs of earlier versions."""
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
    max_recovered: int | None = None
    """Budget of this step; null where it is the start's."""
    total_steps: int | None = None
    """Last step of the run; null where it is the start's."""


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
class RecoveryGapEvent(Event):
    """How much of the gradient's error recovering each unit removes, measured on the batch of `step` before it.

    All are squared norms over the whole model; errors are against the gradient with every unit recovered.
    """

    name: ClassVar[str] = "recovery_gap"

    gaps: list[float]
    """In the order of units.json: error with all units on their low paths, less error with the unit recovered."""
    error: float
    """Error with all units on their low paths."""
    reference: float
    """Of the gradient with every unit recovered."""
    seconds: float
    """That the measurement took; part of no step's time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """The checkpoint of `step` is complete; `kind` is periodic, signal or final."""

    name: ClassVar[str] = "checkpoint"

    path: str
    seconds: float
    """From the start of the save to its end."""
    bytes: int
    kind: str
    blocked_seconds: float | None = None
    """How long training waited for it; null in logs of earlier versions."""


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
    """A run ends; `reason` is completed, signal, diverged or error."""

    name: ClassVar[str] = "finish"

    reason: str
    loss: float
    seconds: float
    tokens: int
    summary: dict[str, Any] = field(default_factory=dict)
    """Figures of the whole run, as `summary.as_dict` gives them."""


EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        StartEvent,
        StepEvent,
        DecisionEvent,
        RecoveryGapEvent,
        CheckpointEvent,
        EvaluationEvent,
        FaultEvent,
        FinishEvent,
    )
}


def to_line(event: Event) -> str:
    """One line of strict JSON; NaN and infinities become the strings "nan", "inf" and "-inf"."""
    record = {"event": event.name, **dataclasses.asdict(event)}
    return json.dumps(strict_json(record), allow_nan=False) + "\n"


def from_line(line: str | bytes) -> Event:
    """The event of a line.

    Raises:
        ValueError: the line is not JSON, of an unknown event or schema, or a field is missing, unknown or of another
            type.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("a JSON object was expected")
    name = record.pop("event", None)
    if not isinstance(name, str) or name not in EVENTS:
        raise ValueError(f"unknown event {name!r}; known are {', '.join(EVENTS)}")
    schema = record.get("schema_version", SCHEMA_VERSION)
    if schema != SCHEMA_VERSION:
        raise ValueError(f"schema_version {schema}; this version reads {SCHEMA_VERSION}")
    event: Event = _build(EVENTS[name], record)
    return event


class EventReader:
    """Iterates over the events of a file in order, one line at a time.

    Args:
        path: an events.jsonl, also one that is still being written.
        only: names of the events to give; other lines are passed over unread. All where it is None.

    Attributes:
        half_line: after the iteration, the number of a last line without its end, which was left out; else None.
    """

    def __init__(self, path: Path, *, only: Collection[str] | None = None) -> None:
        self._path = path
        self._beginnings = (
            None if only is None else tuple(f'{{"event": "{name}"'.encode() for name in only)
        )
        self.half_line: int | None = None

    def __iter__(self) -> Iterator[Event]:
        """Yield each event.

        Raises:
            DataError: a line is broken or of another version; names file and line.
        """
        self.half_line = None
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.half_line = number
                    return
                if self._beginnings is not None and not line.startswith(self._beginnings):
                    continue
                try:
                    yield from_line(line)
                except ValueError as error:
                    raise DataError(
                        f"{self._path}:{number}: is no event that this version knows: {error}"
                    ) from error


def read_events(path: Path) -> list[Event]:
    """Events of a file in order; a last line that is still being written is left out.

    Raises:
        DataError: a line is broken or of another version; names file and line.
    """
    return list(EventReader(path))


def strict_json(value: Any) -> Any:
    """The value with strings for floats that JSON doesn't know, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


_hints = functools.cache(get_type_hints)  # a tenth of a millisecond and more for each class


def _build(kind: Any, record: Any) -> Any:
    """A dataclass out of a JSON object, each value checked against its field's type."""
    if not isinstance(record, dict):
        raise ValueError(f"{kind.__name__}: a JSON object was expected")
    hints = _hints(kind)
    if unknown := sorted(record.keys() - hints.keys()):
        raise ValueError(f"unknown fields {', '.join(unknown)}")
    values = {key: _convert(value, hints[key], key) for key, value in record.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _convert(value: Any, hint: Any, key: str) -> Any:
    if isinstance(hint, UnionType):  # X | None is the only union here
        return None if value is None else _convert(value, get_args(hint)[0], key)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value)
    if hint is float and (type(value) in (int, float) or value in NOT_FINITE):
        return float(value)
    kind = get_origin(hint) or hint
    if type(value) is not kind:
        raise ValueError(f"{key}: {value!r} is no {kind.__name__}")
    if kind is list:
        return [_convert(item, get_args(hint)[0], key) for item in value]
    return value
