"""Whether a run's decisions answered the faults that were injected into it, and how soon."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.observability.events import FaultEvent

WINDOW = 5
"""Steps from the first of a fault within which a decision answers it."""

ANSWERABLE = (
    "scale_gradient", "poison_gradient", "activation_burst", "stale_scale", "bad_batch", "learning_rate_spike",
)  # fmt: skip


@dataclass(frozen=True)
class InjectedFault:
    """A fault as the event log has it.

    Attributes:
        kind: of the fault.
        first: its first step.
        last: its last step.
        units: whom it concerns; all where it is empty.
    """

    kind: str
    first: int
    last: int
    units: tuple[str, ...]


@dataclass(frozen=True)
class Detection:
    """How decisions and faults fit.

    Attributes:
        faults: faults that a decision could answer.
        hits: those for which one of their units was selected within `WINDOW` steps from their first.
        delays: steps from the first step of each hit to that decision; 0 is the decision of the same step.
        false_recoveries: unit-steps that were selected anew (not in the set before) although no fault of the last
            `WINDOW` steps explains it.
        unit_steps: of the run.
    """

    faults: int
    hits: int
    delays: tuple[int, ...]
    false_recoveries: int
    unit_steps: int

    @classmethod
    def nothing(cls) -> Detection:
        """Of a run without control."""
        return cls(0, 0, (), 0, 0)

    @property
    def hit_rate(self) -> float:
        """Share of the faults; NaN without any."""
        return self.hits / self.faults if self.faults else math.nan

    @property
    def false_rate(self) -> float:
        """Share of all unit-steps; NaN without control."""
        return self.false_recoveries / self.unit_steps if self.unit_steps else math.nan

    @property
    def delay(self) -> float:
        """Mean, in steps; NaN without a hit."""
        return sum(self.delays) / len(self.delays) if self.delays else math.nan


def injected_faults(run: RecordedRun) -> Iterator[InjectedFault]:
    """Faults that a decision can answer; steps in a row are one."""
    going: dict[tuple[str, tuple[str, ...]], InjectedFault] = {}
    for event in run.events_of(FaultEvent):
        kind = event.message.split()[0]
        if event.kind != "injected" or kind not in ANSWERABLE:
            continue
        key = (kind, tuple(event.units))
        before = going.get(key)
        if before is not None and before.last == event.step - 1:
            going[key] = InjectedFault(kind, before.first, event.step, before.units)
            continue
        if before is not None:
            yield before
        going[key] = InjectedFault(kind, event.step, event.step, key[1])
    yield from going.values()


def detection(run: RecordedRun) -> Detection:
    """Compare the decisions of a run with its faults."""
    matrix, faults = run.matrix, list(injected_faults(run))
    column = {unit: index for index, unit in enumerate(matrix.units)}
    row = {int(step): index for index, step in enumerate(matrix.steps)}
    selected = matrix.selected
    explained = np.zeros_like(selected)
    delays = []
    for fault in faults:
        columns = [column[unit] for unit in fault.units if unit in column] or list(column.values())
        rows = [row[s] for s in range(fault.first, fault.first + WINDOW) if s in row]
        hit = next((i for i, r in enumerate(rows) if selected[r, columns].any()), None)
        if hit is not None:
            delays.append(hit)
        last = [row[s] for s in range(fault.first, fault.last + WINDOW) if s in row]
        explained[np.ix_(last, columns)] = True
    begun = selected.copy()
    begun[1:] &= ~selected[:-1]
    false = int((begun & ~explained).sum())
    return Detection(len(faults), len(delays), tuple(delays), false, selected.size)
