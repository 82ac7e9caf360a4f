"""Decide again on the norms of a recorded run: with its own settings, or with others.

With its own settings every decision must come out as recorded. With others it tells what the controller would have
decided on these norms; in a run of its own they would have changed as soon as another unit was recovered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.stretches import Settings, changes_settings, stretches
from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.statistics import BoolArray, IntArray
from gnmr_megatron.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a replay comes to.

    Attributes:
        identical: whether every decision is as recorded.
        steps: steps with norms.
        unit_steps: units times steps.
        recovered_unit_steps: sum over steps of the units on the recovery path; in `monitor` mode of those that would
            have been.
        exceedance_rate: share of candidates with a score above 1 in all unit-steps.
        switches: how often a unit changed its path from one step to the next, in either direction.
        budget_use: selected units over what the budgets allowed; above 1 only for a policy without budget.
    """

    identical: bool
    steps: int
    unit_steps: int
    recovered_unit_steps: int
    exceedance_rate: float
    switches: int
    budget_use: float

    def as_dict(self) -> dict[str, Any]:
        """What `replay --json` prints."""
        keys = ("identical", "steps", "recovered_unit_steps", "exceedance_rate", "switches")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What was decided on the norms of a run; arrays are [steps] or [steps, units].

    Attributes:
        units: ids of the columns.
        steps: numbers of the steps.
        selected: after each step.
        in_force: selected before each step, so on the recovery path in it; in `monitor` mode they would have been.
        over_threshold: candidates with a score above 1, as `StepEvent.over_threshold` counts them.
        candidates: number of them after each step.
        budget: `max_recovered` after each step, at most the number of units.
        difference: the first step and units in which the decisions are not those recorded; None where they are.
    """

    units: tuple[str, ...]
    steps: IntArray
    selected: BoolArray
    in_force: BoolArray
    over_threshold: IntArray
    candidates: IntArray
    budget: IntArray
    difference: str | None

    @property
    def figures(self) -> Figures:
        """The sums over all steps and units."""
        allowed = int(self.budget.sum())
        return Figures(
            identical=self.difference is None,
            steps=len(self.steps),
            unit_steps=self.selected.size,
            recovered_unit_steps=int(np.count_nonzero(self.in_force)),
            exceedance_rate=int(self.over_threshold.sum()) / self.selected.size,
            switches=int(np.count_nonzero(self.in_force[1:] != self.in_force[:-1])),
            budget_use=int(np.count_nonzero(self.selected)) / allowed if allowed else 0.0,
        )


def replay(run: RecordedRun, changes: Settings | None = None) -> Replay:
    """Decide on all recorded norms again.

    Where `changes` change nothing, also the recorded recovery sets and ratios are checked, not only the selected units.

    Args:
        run: a recorded run, also one that is still being written.
        changes: settings of the controller to replace, such as `{"alpha": 2.5}`.

    Raises:
        ConfigError: a changed setting is wrong.
        DataError: there are no norms, or some are missing.

    Example:
        replay(RecordedRun(Path("runs/quickstart")), {"alpha": 2.5}).figures.exceedance_rate
    """
    matrix = run.matrix
    size = matrix.selected.shape
    selected, in_force = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    counts = np.zeros((3, size[0]), dtype=np.int64)
    check = None if changes_settings(run, changes) else _Check.of(run)
    decided = np.zeros(size[0], dtype=np.bool_)
    last_selected = np.zeros(0, dtype=np.int64)
    for stretch in stretches(run, changes):
        is_monitor = stretch.controller.config.mode == "monitor"
        if not stretch.goes_on:
            last_selected = stretch.controller.recovery_set
        for row, recovered, decision in stretch:
            if check is not None:
                check.add(row, recovered, decision)
            decided[row] = True
            in_force[row, last_selected if is_monitor else recovered] = True
            selected[row, decision.selected] = True
            over = np.count_nonzero(decision.candidate & (decision.score > 1))
            counts[:, row] = over, np.count_nonzero(decision.candidate), decision.max_recovered
            last_selected = decision.selected
    if not decided.any():
        raise DataError(f"{run.folder}: has no step with norms yet")
    difference = _difference(run, selected, decided, check)
    return Replay(
        units=matrix.units,
        steps=matrix.steps[decided],
        selected=selected[decided],
        in_force=in_force[decided],
        over_threshold=counts[0, decided],
        candidates=counts[1, decided],
        budget=np.minimum(counts[2, decided], size[1]),
        difference=difference,
    )


@dataclass(frozen=True)
class _Check:
    """Recovery sets and ratios of a replay, to compare with the recorded ones."""

    recovered: BoolArray
    gnmr: NDArray[np.float32]
    delta_gnmr: NDArray[np.float32]

    @classmethod
    def of(cls, run: RecordedRun) -> _Check:
        size = run.matrix.selected.shape
        return cls(
            np.zeros(size, dtype=np.bool_),
            np.zeros(size, dtype=np.float32),
            np.zeros(size, dtype=np.float32),
        )

    def add(self, row: int, recovered: IntArray, decision: Decision) -> None:
        self.recovered[row, recovered] = True
        with np.errstate(over="ignore"):  # kept as inf, as the matrix has it
            self.gnmr[row], self.delta_gnmr[row] = decision.gnmr, decision.delta_gnmr


def _difference(
    run: RecordedRun, selected: BoolArray, decided: BoolArray, check: _Check | None
) -> str | None:
    """The first step in which replay and record part, with the units; None where they do not."""
    matrix = run.matrix
    found: list[tuple[int, str]] = []
    if check is not None:
        found += _different_sets(
            run, matrix.recovered, check.recovered, decided, "on the recovery path in it"
        )
        for name in ("gnmr", "delta_gnmr"):
            found += _different_ratios(
                run, name, getattr(matrix, name), getattr(check, name), decided
            )
    found += _different_sets(run, matrix.selected, selected, decided, "selected after it")
    if not found:
        return None
    row, text = min(found, key=lambda item: item[0])  # of equal steps the first kind
    return f"step {matrix.steps[row]}: {text}"


def _different_sets(
    run: RecordedRun, recorded: BoolArray, replayed: BoolArray, decided: BoolArray, what: str
) -> list[tuple[int, str]]:
    rows = np.flatnonzero((recorded != replayed).any(axis=1) & decided)
    if not len(rows):
        return []
    ids = np.array(run.matrix.units, dtype=object)
    row = int(rows[0])
    left, right = (", ".join(ids[flags[row]]) or "none" for flags in (recorded, replayed))
    return [(row, f"{what}, recorded: {left}; replayed: {right}")]


def _different_ratios(
    run: RecordedRun,
    name: str,
    recorded: NDArray[np.float32],
    replayed: NDArray[np.float32],
    decided: BoolArray,
) -> list[tuple[int, str]]:
    is_other = np.ascontiguousarray(recorded).view(np.uint32) != replayed.view(np.uint32)
    rows = np.flatnonzero(is_other.any(axis=1) & decided)
    if not len(rows):
        return []
    row = int(rows[0])
    column = int(np.flatnonzero(is_other[row])[0])
    values = recorded[row, column], replayed[row, column]
    return [
        (
            row,
            f"{name} of {run.matrix.units[column]} is recorded as {values[0]:.6g}, its norms give {values[1]:.6g}",
        )
    ]
