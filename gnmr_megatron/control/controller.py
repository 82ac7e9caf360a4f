"""The controller: from one gradient norm per unit to the recovery set of the next step.

Pure: NumPy only. The same state and the same norms give the same decision on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gnmr_megatron.control.config import ControlConfig, PolicyName
from gnmr_megatron.control.policies import Observation, OraclePolicy, build_policy
from gnmr_megatron.control.schedules import value_at
from gnmr_megatron.control.selection import select_recovery_set
from gnmr_megatron.control.statistics import BoolArray, FloatArray, GradNormHistory, IntArray
from gnmr_megatron.control.units import UnitTable


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided after one step, and from what; arrays are [units] and cannot be written to.

    Attributes:
        policy: who scored.
        step: the step whose gradients were measured; the recovery set is in force in step + 1.
        updated: whether the optimizer took the step.
        gnmr: float64 long-term departure.
        delta_gnmr: float64 sudden shock.
        score: float64; above 1 is risky.
        candidate: bool; risky or still locked.
        lock: int64 lock counters after this decision.
        selected: int64 unit indices within the budget, riskiest first.
        recovery_set: the selected units in `active` mode, empty in `monitor` mode.
        alpha: threshold on GNMR in force.
        beta: threshold on delta-GNMR in force.
        max_recovered: budget in force.
    """

    policy: PolicyName
    step: int
    updated: bool
    gnmr: FloatArray
    delta_gnmr: FloatArray
    score: FloatArray
    candidate: BoolArray
    lock: IntArray
    selected: IntArray
    recovery_set: IntArray
    alpha: float
    beta: float
    max_recovered: int

    def __post_init__(self) -> None:
        # some are the controller's own: a reader that wrote to them would make one rank decide otherwise
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def fingerprint(self) -> bytes:
        """8 bytes that differ where step or recovery set differ."""
        text = np.int64(self.step).tobytes() + self.selected.tobytes() + self.recovery_set.tobytes()
        return hashlib.blake2b(text, digest_size=8).digest()

    def reason(self, unit: int) -> str:
        """Why a selected unit was a candidate: a threshold, its lock, or the policy's own score."""
        if self.score[unit] <= 1:
            return "lock"
        if np.isinf(self.gnmr[unit]):
            return "non_finite"
        if self.policy != "gnmr":
            return "policy"
        passed = {
            "gnmr": self.gnmr[unit] / self.alpha,
            "delta_gnmr": self.delta_gnmr[unit] / self.beta,
        }
        reason = max(passed, key=lambda name: passed[name])
        return reason if passed[reason] == self.score[unit] else "collapse"


class DecidesRecovery(Protocol):
    """What the training step asks for."""

    recovery_set: IntArray
    """Unit indices on the recovery path in the coming step."""

    def decide(self, norms: FloatArray, *, step: int, updated: bool = True) -> Decision:
        """Decide the recovery set of step + 1 from the norms of `step`."""

    def state_dict(self) -> dict[str, Any]:
        """All that resumes, in plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""


class Controller:
    """Keeps each unit's history and lock, and selects at most `max_recovered` units a step.

    Important:
        Call `decide` once per optimizer step, in order, on every rank with the same norms.

    Example:
        >>> from gnmr_megatron.control.units import Unit, UnitTable
        >>> units = UnitTable([Unit(0, 0, "decoder.layers.0.mlp.linear_fc1", (8, 4))])
        >>> controller = Controller(ControlConfig(warmup_steps=0, delta=1), units)
        >>> _ = controller.decide(np.array([1.0]), step=1)
        >>> controller.decide(np.array([9.0]), step=2).recovery_set.tolist()
        [0]
    """

    def __init__(
        self,
        config: ControlConfig,
        units: UnitTable,
        *,
        recorded: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.config = config
        self.units = units
        self._recorded = recorded
        self._step = 0
        self._start()
        self.recovery_set: IntArray = np.zeros(0, dtype=np.int64)
        self._was_recovered: BoolArray = np.zeros(len(units), dtype=np.bool_)
        if self._policy.is_open_loop:
            ones = np.ones(len(units))
            self.recovery_set = self._choose(
                self._observe(0, ones, ones, ones), updated=False
            ).recovery_set

    def _start(self) -> None:
        config, size = self.config, len(self.units)
        self._policy = build_policy(config, self.units, self._recorded)
        self._history = GradNormHistory(
            size,
            delta=config.delta,
            mean=config.mean,
            ema_decay=config.ema_decay,
            window=config.window,
            per_path=config.history == "per_path",
        )
        self._lock: IntArray = np.zeros(size, dtype=np.int64)
        self._steps_seen = 0

    @property
    def history(self) -> GradNormHistory:
        """What it remembers of the norms; to look at, not to change."""
        return self._history

    @property
    def mean_norms(self) -> FloatArray:
        """[units] mean of past norms that the coming GNMR divides by; 0 where there are none."""
        return self._history.mean(self._recovered())

    @property
    def lock(self) -> IntArray:
        """[units] int64 lock counters before the coming decision; to look at, not to change."""
        return self._lock

    @property
    def is_warming_up(self) -> bool:
        """Whether the coming decision only builds history."""
        return self._steps_seen < self.config.warmup_steps and not self._policy.is_open_loop

    def restart_history(self) -> None:
        """Forget norms and locks and warm up again, as after a change of the global batch size."""
        self._start()

    def decide(self, norms: FloatArray, *, step: int, updated: bool = True) -> Decision:
        """Decide the recovery set of step + 1.

        Args:
            norms: [units] float64 gradient norms of the whole model, unscaled, before clipping.
            step: 1-based number of the step that made these gradients.
            updated: whether the optimizer took the step; a skipped step is not folded into the history.

        Raises:
            ValueError: the number of norms is not the number of units.
        """
        norms = np.asarray(norms, dtype=np.float64)  # ratios take the type of the norms
        if norms.shape != (len(self.units),):
            raise ValueError(f"got norms of shape {norms.shape} for {len(self.units)} units")
        recovered = self._recovered()
        stayed = recovered == self._was_recovered
        with np.errstate(all="ignore"):  # a ratio beyond float64 is inf or 0, and so it is meant
            seen = self._observe(step, norms, *self._history.ratios(norms, recovered))
            decision = self._choose(seen, updated=updated)
            if updated:
                self._policy.fold(seen)
                self._history.fold(
                    norms,
                    seen.gnmr,
                    on_recovery=recovered,
                    counted=None if self.config.fold_switches else stayed,
                )
        self._was_recovered = recovered
        self._lock = decision.lock
        self._steps_seen += 1
        self._step = step
        self.recovery_set = decision.recovery_set
        return decision

    def _recovered(self) -> BoolArray:
        """[units] whether a unit is on its recovery path now."""
        recovered = np.zeros(len(self.units), dtype=np.bool_)
        recovered[self.recovery_set] = True
        return recovered

    def foresee(self, gaps: FloatArray) -> IntArray:
        """Choose the recovery set of the coming step from what recovering each unit would bring in it.

        For policy `oracle`, before the step is taken; without a call the last measurement holds.

        Args:
            gaps: [units] float64 error of the gradient that recovering a unit removes.

        Returns:
            The new recovery set.

        Raises:
            ValueError: the policy is another one.
        """
        if not isinstance(self._policy, OraclePolicy):
            raise ValueError(f"policy {self.config.policy} does not look ahead")
        self._policy.gaps = np.array(gaps, dtype=np.float64)
        ones = np.ones(len(self.units))
        seen = self._observe(self._step, ones, ones, ones)
        self.recovery_set = self._choose(seen, updated=False).recovery_set
        return self.recovery_set

    def _observe(
        self, step: int, norms: FloatArray, gnmr: FloatArray, delta_gnmr: FloatArray
    ) -> Observation:
        return Observation(
            step=step,
            norms=norms,
            gnmr=gnmr,
            delta_gnmr=delta_gnmr,
            alpha=value_at(self.config.alpha, step),
            beta=value_at(self.config.beta, step),
        )

    def _choose(self, seen: Observation, *, updated: bool) -> Decision:
        score = self._policy.score(seen)
        candidate = (score > 1) | (self._lock > 0)
        if self.is_warming_up:
            candidate = np.zeros_like(candidate)
        selected = select_recovery_set(score, candidate, self._most(seen.step))
        lock = np.maximum(self._lock - 1, 0)
        if self._policy.has_locks:
            lock[selected[score[selected] > 1]] = self.config.lock_steps
        return Decision(
            policy=self.config.policy,
            step=seen.step,
            updated=updated,
            gnmr=seen.gnmr,
            delta_gnmr=seen.delta_gnmr,
            score=score,
            candidate=candidate,
            lock=lock,
            selected=selected,
            recovery_set=self._switched(selected, seen.step),
            alpha=seen.alpha,
            beta=seen.beta,
            max_recovered=self._budget(seen.step),
        )

    def _budget(self, step: int) -> int:
        return int(value_at(self.config.max_recovered, step))

    def _most(self, step: int) -> int:
        return self._budget(step) if self._policy.is_budgeted else len(self.units)

    def _switched(self, selected: IntArray, step: int) -> IntArray:
        return selected[: self._most(step) if self.config.mode == "active" else 0]

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; per-unit lists follow `units`."""
        return {
            "units": list(self.units.ids),
            "policy": self.config.policy,
            "mean": self.config.mean,
            "policy_state": self._policy.state_dict(),
            "history": {name: array.tolist() for name, array in self._history.state_dict().items()},
            "lock": self._lock.tolist(),
            "steps_seen": self._steps_seen,
            "step": self._step,
            "recovery_set": self.recovery_set.tolist(),
            "was_recovered": np.flatnonzero(self._was_recovered).tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; a recovery set beyond the present budget or mode is cut to it.

        Raises:
            ValueError: the state is of other units, another policy or mean, or delta or window differ.
        """
        self._check_units(state["units"])
        for key in ("policy", "mean"):
            saved, held = state[key], getattr(self.config, key)
            if saved != held:
                raise ValueError(f"the saved {key} is {saved}, gnmr.{key} is {held}")
        self._history.load_state_dict(
            {name: _rows(rows, len(self.units)) for name, rows in state["history"].items()}
        )
        self._policy.load_state_dict(state["policy_state"])
        self._lock = np.array(state["lock"], dtype=np.int64)
        self._steps_seen, self._step = int(state["steps_seen"]), int(state["step"])
        self.recovery_set = self._switched(
            np.array(state["recovery_set"], dtype=np.int64), self._step
        )
        self._was_recovered = np.zeros(len(self.units), dtype=np.bool_)
        # states of earlier versions do not know it
        self._was_recovered[state.get("was_recovered", self.recovery_set.tolist())] = True

    def _check_units(self, ids: Sequence[str]) -> None:
        saved, held = set(ids), set(self.units.ids)
        if saved != held:
            raise ValueError(
                f"the saved controller has {len(saved)} units, this model {len(held)}; "
                f"only saved: {sorted(saved - held)[:3]}, only here: {sorted(held - saved)[:3]}"
            )
        for index, (saved_id, held_id) in enumerate(zip(ids, self.units.ids, strict=True)):
            if saved_id != held_id:
                raise ValueError(
                    f"unit {index} of the saved controller is {saved_id}, here {held_id}"
                )


class DisabledController:
    """Decides nothing: every unit stays on the low path and no norm is looked at."""

    def __init__(self, units: UnitTable) -> None:
        self.units = units
        self.recovery_set: IntArray = np.zeros(0, dtype=np.int64)

    def decide(self, norms: FloatArray, *, step: int, updated: bool = True) -> Decision:
        """An empty decision."""
        none = np.zeros(0)
        return Decision(
            policy="static_low",
            step=step,
            updated=updated,
            gnmr=none,
            delta_gnmr=none,
            score=none,
            candidate=none.astype(np.bool_),
            lock=self.recovery_set,
            selected=self.recovery_set,
            recovery_set=self.recovery_set,
            alpha=0.0,
            beta=0.0,
            max_recovered=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def _rows(rows: list[Any], num_units: int) -> FloatArray:
    """A list back as an array; an empty list of rows keeps its unit axis."""
    array = np.array(rows, dtype=np.float64)
    return array.reshape(0, num_units) if array.size == 0 else array
