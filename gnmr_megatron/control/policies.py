"""Policies: one number per unit that says how much it asks for recovery.

A policy only scores; budget and locks are the controller's. A unit is risky when its score is above 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.schedules import sum_before
from gnmr_megatron.control.statistics import FloatArray
from gnmr_megatron.control.units import UnitTable


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a policy sees of one step; arrays are [units] float64.

    Attributes:
        step: the step whose gradients were measured; 0 before the first one.
        norms: gradient norms, unscaled, before clipping; may hold NaN or inf.
        gnmr: long-term departure.
        delta_gnmr: sudden shock.
        alpha: threshold on GNMR at this step.
        beta: threshold on delta-GNMR at this step.
    """

    step: int
    norms: FloatArray
    gnmr: FloatArray
    delta_gnmr: FloatArray
    alpha: float
    beta: float


class Policy(Protocol):
    """Scores units; `score > 1` means risky."""

    is_open_loop: bool
    """Whether scores ignore gradients: no warm-up then, and step 1 has a recovery set already."""
    has_locks: bool
    """Whether a selected unit keeps its place for T_lock steps."""
    is_budgeted: bool
    """Whether max_recovered limits the recovery set."""

    def score(self, seen: Observation) -> FloatArray:
        """[units] float64 without NaN."""

    def fold(self, seen: Observation) -> None:
        """Learn from a step that the optimizer took."""

    def state_dict(self) -> dict[str, Any]:
        """Lists whose last axis is the unit."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""


class GnmrPolicy:
    """The paper's rule: the larger of GNMR / alpha and delta-GNMR / beta.

    With `collapse_ratio` c also c / GNMR, so that a gradient that shrinks away asks for recovery too.
    """

    is_open_loop = False
    has_locks = True
    is_budgeted = True

    def __init__(self, collapse_ratio: float | None = None) -> None:
        self._collapse_ratio = collapse_ratio

    def score(self, seen: Observation) -> FloatArray:
        """Ratio to the nearer threshold."""
        score = np.maximum(seen.gnmr / seen.alpha, seen.delta_gnmr / seen.beta)
        if self._collapse_ratio is not None:
            score = np.maximum(score, self._collapse_ratio / seen.gnmr)
        return score

    def fold(self, seen: Observation) -> None:
        """Nothing: the controller's history is all it needs."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class FixedPolicy(GnmrPolicy):
    """Scores that are a function of the step alone."""

    is_open_loop = True
    has_locks = False

    def __init__(self, scores: Callable[[int], FloatArray], *, is_budgeted: bool = True) -> None:
        super().__init__()
        self._scores = scores
        self.is_budgeted = is_budgeted

    def score(self, seen: Observation) -> FloatArray:
        """The scores of that step."""
        return self._scores(seen.step)


class OraclePolicy(GnmrPolicy):
    """The units whose recovery removes most of the gradient's error, as measured: an upper bound for the others.

    Important:
        It knows nothing by itself: `Controller.foresee` hands it the measurement.
    """

    is_open_loop = True
    has_locks = False

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.gaps = np.zeros(num_units)
        """[units] float64 error that recovering a unit removes; kept until the next measurement."""

    def score(self, seen: Observation) -> FloatArray:
        """1 and the share of the largest gap; 0 where recovering would do no good."""
        return np.where(self.gaps > 0, 1.0 + self.gaps / np.max(self.gaps, initial=1e-300), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The last measurement."""
        return {"gaps": self.gaps.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the last measurement back."""
        self.gaps = np.array(state["gaps"], dtype=np.float64)


class TopNormPolicy(GnmrPolicy):
    """The units with the largest gradient norms, whatever their history."""

    has_locks = False

    def score(self, seen: Observation) -> FloatArray:
        """2 for the smallest norm, 3 for the next, and so on; a norm that is not finite comes first."""
        norms = np.where(np.isfinite(seen.norms), seen.norms, np.inf)
        # ranks: 1 + norm would round small norms to the same number
        return 2.0 + np.unique(norms, return_inverse=True)[1].astype(np.float64)


class EmaRatioPolicy(GnmrPolicy):
    """Norm over a moving average of clipped norms, against alpha.

    Source: the clipping rule of AdaGC (arXiv 2502.11034), used here as a trigger.
    """

    LEAST_CLIP = 1.05
    """AdaGC's own ratio. An alpha below it triggers often, but as a clip it would keep the average from following."""

    def __init__(self, num_units: int, *, decay: float) -> None:
        super().__init__()
        self._decay = decay
        self._ema = np.full(num_units, np.nan)

    def score(self, seen: Observation) -> FloatArray:
        """(norm / EMA) / alpha; 1 / alpha where there is no EMA yet or it is 0."""
        ratio = np.divide(seen.norms, self._ema, out=np.ones_like(seen.norms), where=self._ema > 0)
        return np.where(np.isfinite(seen.norms), ratio, np.inf) / seen.alpha

    def fold(self, seen: Observation) -> None:
        """Move the average towards the norm, clipped at alpha (at least 1.05) times the average."""
        fresh = ~(self._ema > 0)  # from 0, where LoRA starts, clipping would never let it rise
        limit = max(seen.alpha, self.LEAST_CLIP) * self._ema
        clipped = np.where(fresh, seen.norms, np.minimum(seen.norms, limit))
        moved = np.where(fresh, clipped, self._decay * self._ema + (1 - self._decay) * clipped)
        self._ema = np.where(np.isfinite(seen.norms), moved, self._ema)

    def state_dict(self) -> dict[str, Any]:
        """The averages."""
        return {"ema": self._ema.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the averages back."""
        self._ema = np.array(state["ema"], dtype=np.float64)


class ZScorePolicy(GnmrPolicy):
    """Standard deviations above a moving average, against alpha.

    Source: the detection rule of ZClip (arXiv 2504.02507), used here as a trigger.
    """

    def __init__(self, num_units: int, *, decay: float) -> None:
        super().__init__()
        self._decay = decay
        self._mean = np.full(num_units, np.nan)
        self._variance = np.zeros(num_units)

    def score(self, seen: Observation) -> FloatArray:
        """((norm - mean) / deviation) / alpha; 0 where the deviation is still 0."""
        deviation = np.sqrt(self._variance)
        zscore = np.divide(
            seen.norms - self._mean, deviation, out=np.zeros_like(seen.norms), where=deviation > 0
        )
        return np.where(np.isfinite(seen.norms), np.maximum(zscore, 0.0), np.inf) / seen.alpha

    def fold(self, seen: Observation) -> None:
        """Move mean and variance towards the norm."""
        fresh, finite = np.isnan(self._mean), np.isfinite(seen.norms)
        distance = np.where(fresh, 0.0, seen.norms - self._mean)
        mean = np.where(fresh, seen.norms, self._mean + (1 - self._decay) * distance)
        variance = self._decay * (self._variance + (1 - self._decay) * distance**2)
        self._mean = np.where(finite, mean, self._mean)
        self._variance = np.where(finite, variance, self._variance)

    def state_dict(self) -> dict[str, Any]:
        """Means and variances."""
        return {"mean": self._mean.tolist(), "variance": self._variance.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take means and variances back."""
        self._mean = np.array(state["mean"], dtype=np.float64)
        self._variance = np.array(state["variance"], dtype=np.float64)


def build_policy(
    config: ControlConfig, units: UnitTable, recorded: Mapping[int, Sequence[str]] | None = None
) -> Policy:
    """The policy that the settings name.

    Args:
        config: settings of the controller.
        units: all units of the model.
        recorded: for `replay`, the unit ids selected at each step (step 0: those of the first step).

    Raises:
        ValueError: `replay` without a record, or a record of units that this model lacks.
    """
    size = len(units)
    layers = np.array([unit.layer for unit in units], dtype=np.int64)
    last = int(layers.max(initial=0))

    def random(step: int) -> FloatArray:
        return 2.0 + np.random.default_rng([config.seed, step]).random(size)

    def round_robin(step: int) -> FloatArray:
        first = sum_before(config.max_recovered, step)
        turn = (np.arange(size, dtype=np.float64) - first) % max(size, 1)
        return 2.0 + size - turn

    edge = np.minimum(layers, last - layers)
    # a small budget goes to both ends alike: the first units of both layers before their second ones
    place = np.array([np.sum(layers[:index] == layer) for index, layer in enumerate(layers)])
    edges = np.where(edge < config.edge_layers, 2.0 + last - edge - place / max(size, 1), 0.0)
    policies: dict[str, Callable[[], Policy]] = {
        "gnmr": lambda: GnmrPolicy(config.collapse_ratio),
        "static_low": lambda: FixedPolicy(lambda _: np.zeros(size)),
        "static_high": lambda: FixedPolicy(lambda _: np.full(size, 2.0), is_budgeted=False),
        "first_last_k": lambda: FixedPolicy(lambda _: edges),
        "random": lambda: FixedPolicy(random),
        "round_robin": lambda: FixedPolicy(round_robin),
        "top_norm": TopNormPolicy,
        "ema_ratio": lambda: EmaRatioPolicy(size, decay=config.ema_decay),
        "zscore": lambda: ZScorePolicy(size, decay=config.ema_decay),
        "oracle": lambda: OraclePolicy(size),
        "replay": lambda: _replay(units, recorded),
    }
    return policies[config.policy]()


def _replay(units: UnitTable, recorded: Mapping[int, Sequence[str]] | None) -> Policy:
    if recorded is None:
        raise ValueError("policy replay needs the recorded decisions")
    unknown = sorted({unit for ids in recorded.values() for unit in ids} - set(units.ids))
    if unknown:
        raise ValueError(f"the recorded run has unit {unknown[0]}, this model has not")

    def scores(step: int) -> FloatArray:
        score = np.zeros(len(units))
        for rank, unit in enumerate(recorded.get(step, ())):
            score[units.index(unit)] = 2.0 + len(units) - rank
        return score

    return FixedPolicy(scores)
