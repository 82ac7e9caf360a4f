"""The attempts of a recorded run, with the controller that decides on their norms again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnmr_megatron.analysis.recorded_run import RecordedRun, Segment
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller, Decision
from gnmr_megatron.control.statistics import IntArray
from gnmr_megatron.errors import ConfigError, DataError
from gnmr_megatron.observability.risk_matrix import read_risk_matrix

Settings = Mapping[str, Any]
"""Some fields of `ControlConfig` and their values."""


@dataclass(frozen=True)
class Stretch:
    """Steps of one attempt, and the controller that decides on them.

    Attributes:
        rows: of the run's matrix.
        controller: in the state before the first of them.
        goes_on: whether that is the state after the stretch before.
    """

    run: RecordedRun
    rows: range
    controller: Controller
    goes_on: bool

    def __iter__(self) -> Iterator[tuple[int, IntArray, Decision]]:
        """Decide on each row: its index, the recovery set in force in that very step, and the decision after it."""
        matrix = self.run.matrix
        norms = np.ascontiguousarray(matrix.norms[self.rows.start : self.rows.stop])
        steps = matrix.steps[self.rows.start : self.rows.stop].tolist()
        updated = matrix.updated[self.rows.start : self.rows.stop].tolist()
        gaps = self.run.recovery_gaps if self.controller.config.policy == "oracle" else {}
        for index, row in enumerate(self.rows):
            if steps[index] in gaps:
                self.controller.foresee(np.array(gaps[steps[index]]))
            in_force = self.controller.recovery_set
            yield (
                row,
                in_force,
                self.controller.decide(norms[index], step=steps[index], updated=updated[index]),
            )


def stretches(run: RecordedRun, changes: Settings | None = None) -> Iterator[Stretch]:
    """The attempts of a run one after the other; each takes up the state that the one before has left.

    Decide on all steps of a stretch before asking for the next one.

    Args:
        run: with norms of all steps in which control was on.
        changes: settings to replace in every attempt.

    Raises:
        ConfigError: a changed setting is wrong.
        DataError: norms are missing, or the settings of an attempt do not go on with the state before it.
    """
    controller: Controller | None = None
    for segment, rows in segment_rows(run):
        if segment.config.mode == "disabled":
            controller = None  # its checkpoints hold no state
        elif len(rows):
            config, goes_on = changed(segment.config, changes), controller is not None
            if config.policy == "oracle" and not run.recovery_gaps:
                raise DataError(
                    f"{run.folder}: policy oracle needs measured recovery gaps, and it has none (train.oracle_interval)"
                )
            controller = _next_controller(run, config, former=controller)
            if segment.restarts_history:
                controller.restart_history()
            yield Stretch(run, rows, controller, goes_on)


def changed(config: ControlConfig, changes: Settings | None) -> ControlConfig:
    """The settings with these changes.

    Raises:
        ConfigError: they are out of range, or `mode: disabled`, in which nothing is decided.
    """
    config = dataclasses.replace(config, **(changes or {}))
    if config.mode == "disabled":
        raise ConfigError(
            "gnmr.mode: disabled decides nothing that could be replayed; use active or monitor"
        )
    return config


def segment_rows(run: RecordedRun) -> Iterator[tuple[Segment, range]]:
    """Each segment of a run with its rows of the matrix.

    Raises:
        DataError: steps are missing, so that nobody knows the state after them.
    """
    steps, segments = run.matrix.steps, run.segments
    ends = [segment.first_step for segment in segments[1:]]
    stops = [int(np.searchsorted(steps, end)) for end in ends] + [len(steps)]
    start = 0
    for number, (segment, stop) in enumerate(zip(segments, stops, strict=True)):
        rows = range(start, stop)
        if segment.config.mode != "disabled":
            last = ends[number] - 1 if number < len(ends) else None
            _check_complete(run, segment.first_step, last, rows)
        yield segment, rows
        start = stop


def _check_complete(run: RecordedRun, first: int, last: int | None, rows: range) -> None:
    steps = run.matrix.steps[rows.start : rows.stop]
    if first > 1 and first == run.segments[0].first_step:
        raise DataError(
            f"{run.folder}: its log begins with step {first}; without the steps before, the state of the controller "
            "is not known"
        )
    wanted = np.arange(first, first + len(steps) if last is None else last + 1)
    if not np.array_equal(steps, wanted):
        missing = np.setdiff1d(wanted, steps)
        where = f"step {missing[0]} is missing" if len(missing) else "its steps are out of order"
        raise DataError(f"{run.folder}: its risk matrix is not whole: {where}")


def _next_controller(
    run: RecordedRun, config: ControlConfig, *, former: Controller | None
) -> Controller:
    trace = None
    if config.policy == "replay":
        folder = Path(config.trace or "")
        try:
            trace = read_risk_matrix(folder).decisions()
        except DataError as error:
            raise ConfigError(f"gnmr.trace: {error}") from error
    try:
        controller = Controller(config, run.units, recorded=trace)
    except ValueError as error:
        raise ConfigError(f"gnmr.trace: {config.trace}: {error}") from error
    if former is not None:
        try:
            controller.load_state_dict(former.state_dict())
        except ValueError as error:
            raise DataError(
                f"{run.folder}: an attempt does not go on with the state before it: {error}"
            ) from error
    return controller


def changes_settings(run: RecordedRun, changes: Settings | None) -> bool:
    """Whether the settings of any attempt change."""
    return any(
        changed(segment.config, changes) != segment.config
        for segment in run.segments
        if segment.config.mode != "disabled"
    )
