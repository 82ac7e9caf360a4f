"""Whether a run's decisions answered the faults that were injected into it, and how soon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.statistics import FloatArray
from gnmr_megatron.observability.events import FaultEvent, StepEvent

WINDOW = 5
"""Steps from the first of a fault within which a decision answers it."""

AFTERMATH = 20
"""Steps from the first of a fault whose loss it may have raised."""

BURST = 3.0
"""A fault that raises a gradient norm by this factor is one that control has to answer at once."""

ANSWERABLE = (
    "scale_gradient", "poison_gradient", "activation_burst", "stale_scale", "bad_batch", "learning_rate_spike",
)  # fmt: skip


@dataclass(frozen=True)
class InjectedFault:
    """A fault as the event log has it.

    Attributes:
        message: its kind, and how strong it is.
        first: its first step.
        last: its last step.
        units: whom it concerns; all where it is empty.
    """

    message: str
    first: int
    last: int
    units: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The kind of the fault."""
        return self.message.split()[0]


@dataclass(frozen=True)
class Answer:
    """What a run's decisions and losses made of one fault.

    Attributes:
        fault: the fault.
        delay: steps from its first step to the decision for one of its units; 0 is the decision of the same step, which
            the next one runs with. None where there was none within `WINDOW` steps.
        raised: norm of its units' gradients in its first step over the mean of the `WINDOW` steps before, that of the
            unit with the most; NaN where there are none.
        excess_loss: mean training loss of the `AFTERMATH` steps from its first, above that of a run without faults
            on the same batches; NaN without such a run.
    """

    fault: InjectedFault
    delay: int | None
    raised: float
    excess_loss: float

    @property
    def is_burst(self) -> bool:
        """Whether it raised a unit's gradient norm beyond doubt."""
        return self.raised >= BURST


@dataclass(frozen=True)
class Detection:
    """How decisions and faults fit.

    Attributes:
        answers: one for each fault that a decision could answer.
        false_recoveries: unit-steps that were selected anew (not in the set before) although no fault of the last
            `WINDOW` steps explains it: none concerned the unit or raised its norm, too, by `BURST`.
        unit_steps: of the run; 0 without control.
    """

    answers: tuple[Answer, ...]
    false_recoveries: int
    unit_steps: int

    @property
    def hit_rate(self) -> float:
        """Share of the faults that were answered; NaN without any."""
        return _share(answer.delay is not None for answer in self.answers)

    @property
    def burst_hit_rate(self) -> float:
        """Share of the bursts whose unit ran on the recovery path in the next step; NaN without any."""
        return _share(answer.delay == 0 for answer in self.answers if answer.is_burst)

    @property
    def false_rate(self) -> float:
        """Share of all unit-steps; NaN without control."""
        return self.false_recoveries / self.unit_steps if self.unit_steps else math.nan

    @property
    def delay(self) -> float:
        """Mean, in steps; NaN without a hit."""
        return _mean(answer.delay for answer in self.answers if answer.delay is not None)

    @property
    def excess_loss(self) -> float:
        """Mean over faults; NaN where it is not known."""
        return _mean(answer.excess_loss for answer in self.answers)


def injected_faults(run: RecordedRun) -> Iterator[InjectedFault]:
    """Faults that a decision can answer; steps in a row are one."""
    going: dict[tuple[str, tuple[str, ...]], InjectedFault] = {}
    for event in run.events_of(FaultEvent):
        if event.kind != "injected" or event.message.split()[0] not in ANSWERABLE:
            continue
        key = (event.message, tuple(event.units))
        before = going.get(key)
        if before is not None and before.last == event.step - 1:
            going[key] = InjectedFault(event.message, before.first, event.step, before.units)
            continue
        if before is not None:
            yield before
        going[key] = InjectedFault(event.message, event.step, event.step, key[1])
    yield from going.values()


def detection(run: RecordedRun, undisturbed: RecordedRun | None = None) -> Detection:
    """Compare the decisions of a run with its faults.

    Args:
        run: with faults; where its control is disabled, only losses are compared.
        undisturbed: the same run without faults.
    """
    faults = list(injected_faults(run))
    losses = _losses(run)
    others = _losses(undisturbed) if undisturbed is not None else {}
    if run.starts[0].mode == "disabled":
        unanswered = (Answer(f, None, math.nan, _excess(f, losses, others)) for f in faults)
        return Detection(tuple(unanswered), 0, 0)
    matrix = run.matrix
    norms = np.asarray(matrix.norms)
    column = {unit: index for index, unit in enumerate(matrix.units)}
    row = {int(step): index for index, step in enumerate(matrix.steps)}
    selected = matrix.selected
    explained = np.zeros_like(selected)
    answers = []
    for fault in faults:
        columns = [column[unit] for unit in fault.units if unit in column] or list(column.values())
        touched = [row[s] for s in range(fault.first, fault.last + WINDOW) if s in row]
        answering = enumerate(touched[:WINDOW])
        delay = next((i for i, at in answering if selected[at, columns].any()), None)
        ratios = _over_before(norms, touched)
        raised = _largest(ratios[:1, columns])
        answers.append(Answer(fault, delay, raised, _excess(fault, losses, others)))
        explained[touched] |= (ratios >= BURST).any(axis=0)
        for at in touched:
            explained[at, columns] = True
    begun = selected.copy()
    begun[1:] &= ~selected[:-1]
    return Detection(tuple(answers), int((begun & ~explained).sum()), selected.size)


def _over_before(norms: FloatArray, rows: list[int]) -> FloatArray:
    """Norms of rows over the means of the finite ones in the `WINDOW` rows before; NaN where there are none.

    Infinite for a norm that is not finite itself: no gradient is raised more.
    """
    before = norms[max(rows[0] - WINDOW, 0) : rows[0]] if rows else norms[:0]
    is_finite = np.isfinite(before)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(is_finite, before, 0.0).sum(axis=0) / is_finite.sum(axis=0)
        ratios: FloatArray = norms[rows] / mean
    return np.where(np.isfinite(norms[rows]) | np.isnan(mean), ratios, np.inf)


def _largest(ratios: FloatArray) -> float:
    known = ratios[~np.isnan(ratios)]
    return float(known.max()) if known.size else math.nan


def _losses(run: RecordedRun) -> dict[int, float]:
    return {event.step: event.loss for event in run.events_of(StepEvent)}


def _excess(
    fault: InjectedFault, losses: Mapping[int, float], others: Mapping[int, float]
) -> float:
    steps = range(fault.first, fault.first + AFTERMATH)
    return _mean(losses[step] - others[step] for step in steps if step in losses and step in others)


def _share(items: Iterable[bool]) -> float:
    return _mean(float(item) for item in items)


def _mean(items: Iterable[float]) -> float:
    values = list(items)
    return sum(values) / len(values) if values else math.nan
