"""The tables of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnmr_megatron.analysis.report.blocks import Spans
from gnmr_megatron.analysis.report.history import REASONS, RunHistory
from gnmr_megatron.control.statistics import FloatArray, IntArray
from gnmr_megatron.control.units import UnitTable

STRETCHES = 12
MOST = 15


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Figures of some steps in a row; means where nothing else is said.

    Attributes:
        first: first step.
        last: last step.
        loss: mean of the finite ones.
        lowest_loss: of the finite ones.
        highest_loss: of the finite ones.
        grad_norm: median.
        tokens_per_second: mean.
        recovered: units on the recovery path.
        max_recovered: budget.
        locked: units with a lock.
        exceedance_percent: unit-steps over a threshold, of all.
        switches_per_1000: changes of a unit's path in 1,000 steps.
        control_percent: deciding and switching, of the time of all steps.
    """

    first: int
    last: int
    loss: float
    lowest_loss: float
    highest_loss: float
    grad_norm: float
    tokens_per_second: float
    recovered: float
    max_recovered: float
    locked: float
    exceedance_percent: float
    switches_per_1000: float
    control_percent: float


def stretches(history: RunHistory, locked: IntArray) -> list[Stretch]:
    """The run in at most STRETCHES parts of equal length."""
    series = history.series
    rows = []
    for part in np.array_split(np.arange(len(series)), min(STRETCHES, len(series)) or 1):
        if not len(part):
            continue
        losses = series.loss[part]
        losses = losses[np.isfinite(losses)]
        seconds = float(series.step_seconds[part].sum())
        rows.append(
            Stretch(
                first=int(series.step[part[0]]),
                last=int(series.step[part[-1]]),
                loss=_or_nan(losses, "mean"),
                lowest_loss=_or_nan(losses, "min"),
                highest_loss=_or_nan(losses, "max"),
                grad_norm=float(np.median(series.grad_norm[part])),
                tokens_per_second=float(series.tokens_per_second[part].mean()),
                recovered=float(series.recovered[part].mean()),
                max_recovered=float(series.max_recovered[part].mean()),
                locked=float(locked[part].mean()),
                exceedance_percent=100
                * float(series.over_threshold[part].mean())
                / max(history.start.num_units, 1),
                switches_per_1000=1000 * float(series.switches[part].mean()),
                control_percent=100 * float(series.control_seconds[part].sum()) / seconds
                if seconds
                else 0.0,
            )
        )
    return rows


def _or_nan(values: FloatArray, what: str) -> float:
    return float(getattr(values, what)()) if len(values) else float("nan")


@dataclass(frozen=True, kw_only=True)
class UnitRow:
    """How often a unit was on the recovery path, and why.

    Attributes:
        unit: its id.
        steps: on the recovery path.
        percent: of the steps of the run.
        times: stretches of such steps.
        highest_score: of the decisions that selected it; None where no decision tells.
        reasons: of its steps, most frequent first.
    """

    unit: str
    steps: int
    percent: float
    times: int
    highest_score: float | None
    reasons: tuple[tuple[str, int], ...]


def most_recovered(history: RunHistory, spans: Spans) -> list[UnitRow]:
    """The MOST units with the most steps on the recovery path, as the spans tell."""
    lengths = spans.last - spans.first + 1
    totals = np.bincount(spans.unit, weights=lengths, minlength=len(history.units)).astype(int)
    ranking = np.argsort(-totals, kind="stable")[:MOST]
    return [_unit_row(history, spans, int(unit)) for unit in ranking if totals[unit]]


def _unit_row(history: RunHistory, spans: Spans, unit: int) -> UnitRow:
    mine = spans.unit == unit
    first, last, reason = spans.first[mine], spans.last[mine], spans.reason[mine]
    steps = int((last - first + 1).sum())
    times = 1 + int((first[1:] != last[:-1] + 1).sum())
    reasons: Counter[str] = Counter()
    for kind, length in zip(reason.tolist(), (last - first + 1).tolist(), strict=True):
        reasons[reason_name(kind)] += length
    scores = history.selections.score[history.selections.unit == unit]
    return UnitRow(
        unit=history.units[unit],
        steps=steps,
        percent=100 * steps / max(len(history.series), 1),
        times=times,
        highest_score=float(scores.max()) if len(scores) else None,
        reasons=tuple(reasons.most_common()),
    )


def reason_name(reason: int) -> str:
    """The reason of a decision in words."""
    name = (*REASONS, "not told")[reason]
    return {"gnmr": "GNMR", "delta_gnmr": "delta-GNMR"}.get(name, name.replace("_", " "))


@dataclass(frozen=True, kw_only=True)
class Places:
    """Steps on the recovery path by layer and operator.

    Attributes:
        operators: names, in the order of the layer.
        rows: layer, its count for each operator (None where it has none), and its total.
        totals: for each operator.
        total: of all.
        largest: count of a layer and operator.
    """

    operators: tuple[str, ...]
    rows: tuple[tuple[int, tuple[int | None, ...], int], ...]
    totals: tuple[int, ...]
    total: int
    largest: int


def places(units: UnitTable, spans: Spans) -> Places:
    """Where in the model units were recovered."""
    lengths = spans.last - spans.first + 1
    counts = np.bincount(spans.unit, weights=lengths, minlength=len(units)).astype(int).tolist()
    operators = tuple(dict.fromkeys(unit.operator for unit in units))
    table: dict[int, dict[str, int]] = {}
    for unit, count in zip(units, counts[: len(units)], strict=True):
        row = table.setdefault(unit.layer, {})
        row[unit.operator] = row.get(unit.operator, 0) + count
    return Places(
        operators=operators,
        rows=tuple(
            (layer, tuple(row.get(operator) for operator in operators), sum(row.values()))
            for layer, row in table.items()
        ),
        totals=tuple(sum(row.get(operator, 0) for row in table.values()) for operator in operators),
        total=sum(counts[: len(units)]),
        largest=max((count for row in table.values() for count in row.values()), default=0),
    )


SECRET_WORDS = ("api_key", "apikey", "secret", "password", "credential", "access_token")


def settings(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configuration by section, each key with its value; a value whose key speaks of a secret is left out."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            sections.setdefault(key, []).extend(_flat(value, ""))
        else:
            sections.setdefault("run", []).append((key, _shown(key, value)))
    return sorted(sections.items(), key=lambda item: item[0] != "run")


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and all(isinstance(item, str) for item in value):
            rows.extend(_flat(value, f"{name}."))
        else:
            rows.append((name, _shown(name, value)))
    return rows


def _shown(key: str, value: object) -> str:
    if any(word in key.lower() for word in SECRET_WORDS):
        return "(left out)"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return str(value)
