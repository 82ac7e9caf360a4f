"""A run's numbers as compressed blocks of text, which the page unpacks.

A block is base64 of a zlib stream. `series` and `cells` hold JSON, `grid` the bytes of `Grid.packed`.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnmr_megatron.analysis.report.history import UNKNOWN_REASON, RunHistory, Selections
from gnmr_megatron.analysis.report.spikes import Spike
from gnmr_megatron.control.statistics import IntArray
from gnmr_megatron.observability.risk_matrix import RiskMatrix

ALL_LISTED = 100_000
"""Up to so many cells, norm, GNMR and delta-GNMR of every one are in the page; beyond, of the recovered ones."""

Numbers = NDArray[np.floating] | IntArray | Sequence[float]


def block(content: bytes) -> str:
    """The content compressed, as text."""
    return base64.b64encode(zlib.compress(content, 6)).decode()


def series_block(history: RunHistory, locked: IntArray, spikes: Sequence[Spike]) -> str:
    """One number a step of what the page draws as lines."""
    series = history.series
    with np.errstate(divide="ignore", invalid="ignore"):
        control = 100 * series.control_seconds / series.step_seconds
    columns: dict[str, str] = {
        "step": _list(series.step),
        "loss": _list(series.loss, digits=6),
        "grad_norm": _list(series.grad_norm, digits=4),
        "tokens_per_second": _list(series.tokens_per_second, digits=4),
        "recovered": _list(series.recovered),
        "max_recovered": _list(series.max_recovered),
        "locked": _list(locked),
        "exceedance_percent": _list(
            100 * series.over_threshold / max(history.start.num_units, 1), digits=4
        ),
        "switches_per_1000": _list(1000 * series.switches),
        "control_percent": _list(control, digits=3),
    }
    evaluations, checkpoints = history.evaluations, history.checkpoints
    columns["evaluations"] = _object(
        {
            "step": _list([event.step for event in evaluations]),
            "loss": _list([event.loss for event in evaluations], digits=6),
        }
    )
    columns["spikes"] = _object(
        {
            "step": _list([spike.step for spike in spikes]),
            "loss": _list([spike.loss for spike in spikes], digits=6),
        }
    )
    columns["checkpoints"] = _list([event.step for event in checkpoints])
    return block(_object(columns).encode())


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Units on the recovery path from a first to a last step, for one reason; by unit, then by step."""

    unit: IntArray
    first: IntArray
    last: IntArray
    reason: IntArray

    def __len__(self) -> int:
        return len(self.unit)


def recovery_spans(history: RunHistory, *, selected: bool = False) -> Spans:
    """When each unit was on the recovery path, and why the decision before had put it there.

    Args:
        history: of a run.
        selected: instead when the unit would have been on it, had the mode not been monitor.
    """
    chosen = history.selections
    keys = _keys(chosen.unit, chosen.step + 1)
    order = np.argsort(keys, kind="stable")
    keys, reasons = keys[order], chosen.reason[order]
    if selected:
        cells = keys
    else:
        cells = np.sort(_keys(history.recovered.unit, history.recovered.step))
        places = np.searchsorted(keys, cells)
        known = places < len(keys)
        known[known] = keys[places[known]] == cells[known]
        found = np.full(len(cells), UNKNOWN_REASON)
        found[known] = reasons[places[known]]
        reasons = found
    starts = np.ones(len(cells), dtype=np.bool_)
    starts[1:] = (np.diff(cells) != 1) | (np.diff(reasons) != 0)
    ends = np.append(starts[1:], True)[: len(cells)]
    unit, step = np.divmod(cells, _STRIDE)
    return Spans(unit=unit[starts], first=step[starts], last=step[ends], reason=reasons[starts])


_STRIDE = 1 << 40  # more than there are steps


def _keys(unit: IntArray, step: IntArray) -> IntArray:
    return unit * _STRIDE + step


def cells_block(spans: Spans, selections: Selections, matrix: RiskMatrix | None) -> str:
    """Spans of recovery, what each decision saw in the units it selected, and the listed cells of the matrix."""
    parts = {
        "spans": _object(
            {name: _list(getattr(spans, name)) for name in ("unit", "first", "last", "reason")}
        ),
        "selections": _object(
            {
                "unit": _list(selections.unit),
                "step": _list(selections.step),
                "score": _list(selections.score, digits=4),
                "lock": _list(selections.lock),
                "reason": _list(selections.reason),
            }
        ),
        "listed": "null" if matrix is None else _listed(matrix),
    }
    return block(_object(parts).encode())


def _listed(matrix: RiskMatrix) -> str:
    """Norm, GNMR and delta-GNMR with four digits, unit by unit."""
    is_small = matrix.gnmr.size <= ALL_LISTED
    wanted = np.ones_like(matrix.recovered) if is_small else matrix.recovered | matrix.selected
    unit, row = np.nonzero(wanted.T)
    return _object(
        {
            "unit": _list(unit),
            "step": _list(matrix.steps[row]),
            "norm": _list(matrix.norms[row, unit], digits=4),
            "gnmr": _list(matrix.gnmr[row, unit], digits=4),
            "delta_gnmr": _list(matrix.delta_gnmr[row, unit], digits=4),
        }
    )


def _object(parts: Mapping[str, str]) -> str:
    """A JSON object of values that are JSON already."""
    return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"


def _list(values: Numbers, *, digits: int | None = None) -> str:
    """A JSON list; whole numbers, or so many significant digits and strings for what is not finite."""
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    if digits is None:
        return "[" + ",".join(map(str, plain)) + "]"
    form = f"%.{digits}g"
    texts = (form % value if math.isfinite(value) else f'"{value}"' for value in plain)
    return "[" + ",".join(texts) + "]"
