"""What the log tells of a decision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.observability.events import DecisionEvent, SelectedUnit


@dataclass(frozen=True)
class Risk:
    """The units of a step at a glance.

    Attributes:
        over_threshold: units with a score above 1, whether or not the budget let them in.
        unit: the one of highest score; None where there is none.
        score: its score; 0 where there is none.
    """

    over_threshold: int
    unit: str | None
    score: float


def risk_of(decision: Decision, units: UnitTable) -> Risk:
    """How many units were risky, and which most."""
    over_threshold = int(np.count_nonzero(decision.candidate & (decision.score > 1)))
    if not decision.score.size:
        return Risk(over_threshold, None, 0.0)
    riskiest = int(np.argmax(decision.score))
    return Risk(over_threshold, units.ids[riskiest], float(decision.score[riskiest]))


def decision_event(decision: Decision, units: UnitTable) -> DecisionEvent:
    """The selected units and why, riskiest first."""
    return DecisionEvent(
        step=decision.step,
        selected=[
            SelectedUnit(
                unit=units.ids[index],
                gnmr=float(decision.gnmr[index]),
                delta_gnmr=float(decision.delta_gnmr[index]),
                score=float(decision.score[index]),
                lock=int(decision.lock[index]),
                reason=decision.reason(index),
            )
            for index in decision.selected.tolist()
        ],
    )
