"""A run as its folder tells it, finished or still being written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.errors import ConfigError, DataError
from gnmr_megatron.observability.event_log import FILE
from gnmr_megatron.observability.events import (
    Event,
    EventReader,
    FaultEvent,
    RecoveryGapEvent,
    StartEvent,
)
from gnmr_megatron.observability.risk_matrix import UNITS, RiskMatrix, read_risk_matrix

CONFIG = "config.yaml"

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of one attempt: from `first_step` up to the next segment.

    Attributes:
        first_step: 1-based.
        config: settings of the controller in them.
        restarts_history: whether the controller began anew there.
    """

    first_step: int
    config: ControlConfig
    restarts_history: bool


class RecordedRun:
    """Reads a run folder, each part when it is first asked for; writes nothing.

    Args:
        folder: the run folder, also of a run that is still going.
        last_step: norms and segments of later steps are left out.

    Raises:
        DataError: it is no run folder, or the run has not begun; also later, where a part cannot be read.
    """

    def __init__(self, folder: Path, *, last_step: int | None = None) -> None:
        self.folder, self._last_step = folder, last_step
        if not (folder / FILE).is_file():
            raise DataError(f"{folder}: is no run folder, it has no {FILE}")
        if not self.starts:
            raise DataError(
                f"{folder / FILE}: has no start event yet; the run is still being set up, or it failed there"
            )

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def events(self, *kinds: type[Event]) -> Iterator[Event]:
        """Events of these kinds in order, or all; a last line that is half written is left out."""
        return iter(EventReader(self.folder / FILE, only=[kind.name for kind in kinds] or None))

    def events_of(self, kind: type[E]) -> Iterator[E]:
        """Events of one kind in order."""
        return (event for event in self.events(kind) if isinstance(event, kind))

    @cached_property
    def starts(self) -> tuple[StartEvent, ...]:
        """The first start, and one for each resume."""
        return tuple(self.events_of(StartEvent))

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings of the run, as the last attempt wrote them; empty where there is no config.yaml."""
        path = self.folder / CONFIG
        if not path.is_file():
            return {}
        try:
            settings = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
        return settings if isinstance(settings, dict) else {}

    @cached_property
    def matrix(self) -> RiskMatrix:
        """Norms, ratios and flags of all units and steps."""
        matrix = read_risk_matrix(self.folder)
        return matrix if self._last_step is None else matrix.until(self._last_step)

    @cached_property
    def units(self) -> UnitTable:
        """The units in the order of the matrix's columns."""
        path = self.folder / UNITS
        try:
            rows = json.loads(path.read_text())["units"]
            return UnitTable(
                Unit(row["layer"], position, row["id"], tuple(row["shape"]))
                for position, row in enumerate(rows)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); runs with gnmr.mode: disabled have none"
            ) from error

    @cached_property
    def recovery_gaps(self) -> dict[int, list[float]]:
        """Measured recovery gaps, in the order of the units, by step; empty where none were measured."""
        return {event.step: event.gaps for event in self.events_of(RecoveryGapEvent)}

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The settings of the controller over the steps, one segment for each start that took a step."""
        found: dict[int, Segment] = {}
        for event in self.events(StartEvent, FaultEvent):
            if isinstance(event, StartEvent):
                found[event.step] = Segment(
                    first_step=event.step,
                    config=self._control(event),
                    restarts_history=False,
                )
            elif isinstance(event, FaultEvent) and event.kind == "history_restart":
                first = event.step + 1
                found[first] = Segment(
                    first_step=first, config=found[first].config, restarts_history=True
                )
        last = self._last_step
        return tuple(found[step] for step in sorted(found) if last is None or step <= last)

    def _control(self, start: StartEvent) -> ControlConfig:
        plain = self.config.get("gnmr", {}) if start.control is None else start.control
        try:
            return ControlConfig.from_plain(plain)
        except (ConfigError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.folder}: the settings of its controller are not of this version: {error}"
            ) from error
