"""The riskiest units of the last step, out of the end of the risk matrix: training does nothing for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.policies import GnmrPolicy, Observation
from gnmr_megatron.control.schedules import value_at
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.observability.events import StartEvent
from gnmr_megatron.observability.live.progress import RunProgress
from gnmr_megatron.observability.risk_matrix import (
    MATRIX,
    RECOVERED,
    SELECTED,
    UNITS,
    risk_matrix_dtype,
)


@dataclass(frozen=True)
class UnitRisk:
    """A unit and its score after the last step: above 1 it is over a threshold."""

    unit: str
    score: float
    is_recovered: bool
    """On the recovery path in that step."""
    is_selected: bool
    """Chosen for the next one."""


class UnitRisks:
    """Reads the last record of a folder's matrix.

    Args:
        folder: run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start: StartEvent | None = None
        self._control: ControlConfig | None = None
        self._units: tuple[str, ...] = ()

    def riskiest(self, progress: RunProgress, count: int) -> list[UnitRisk]:
        """Units of the highest scores first.

        Only what the last step's event tells, one unit, where there is no matrix, or where the policy's score is no
        function of it.
        """
        try:
            record = self._last_record(progress.start)
        except (OSError, ValueError, KeyError, TypeError, ConfigError):
            record = (
                None  # not there yet, being replaced, or of another version: a view goes without
            )
        if record is None or self._control is None:
            return _of_event(progress)
        scores = _scores(record, self._control)
        order = np.argsort(-scores, kind="stable")[:count]
        return [
            UnitRisk(
                unit=self._units[index],
                score=float(scores[index]),
                is_recovered=bool(record["flags"][index] & RECOVERED),
                is_selected=bool(record["flags"][index] & SELECTED),
            )
            for index in order
        ]

    def _last_record(self, start: StartEvent | None) -> Any:
        """The last whole record; None without one."""
        if start is not self._start:
            self._read_start(start)
        if not self._units:
            return None
        dtype = risk_matrix_dtype(len(self._units))
        with (self._folder / MATRIX).open("rb") as file:
            whole = file.seek(0, 2) // dtype.itemsize
            if not whole:
                return None
            file.seek((whole - 1) * dtype.itemsize)
            data = file.read(dtype.itemsize)
        return np.frombuffer(data, dtype)[0] if len(data) == dtype.itemsize else None

    def _read_start(self, start: StartEvent | None) -> None:
        self._units, self._control = (), None
        if start is None or start.control is None or start.policy != "gnmr":
            return
        self._control = ControlConfig.from_plain(start.control)
        description = json.loads((self._folder / UNITS).read_text())
        self._units = tuple(unit["id"] for unit in description["units"])
        self._start = start


def _scores(record: Any, control: ControlConfig) -> Any:
    """The controller's scores again."""
    step = int(record["step"])
    seen = Observation(
        step=step,
        norms=record["norm"],
        gnmr=record["gnmr"].astype(np.float64),
        delta_gnmr=record["delta_gnmr"].astype(np.float64),
        alpha=value_at(control.alpha, step),
        beta=value_at(control.beta, step),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return GnmrPolicy(control.collapse_ratio).score(seen)


def _of_event(progress: RunProgress) -> list[UnitRisk]:
    last = progress.last
    if last is None or last.riskiest_unit is None:
        return []
    unit, recovered = last.riskiest_unit, last.riskiest_unit in last.recovered
    return [UnitRisk(unit, last.riskiest_score, is_recovered=recovered, is_selected=False)]
