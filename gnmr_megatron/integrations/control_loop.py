"""What all hosts share: the controller, the number of the step, and what is remembered."""

from __future__ import annotations

import time
from typing import Any

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.statistics import FloatArray, IntArray
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.integrations.run_record import MeasuredStep
from gnmr_megatron.observability.risk_matrix import recorded_decisions


class ControlLoop:
    """Decides once a step of the host.

    Args:
        config: settings of the controller.
        units: of the whole model.

    Attributes:
        step: steps that the host has taken.
        measured: the last of them that was measured; None before the first.

    Raises:
        ConfigError: control is disabled, or the trace to replay is of other units.
    """

    def __init__(self, config: ControlConfig, units: UnitTable) -> None:
        if config.mode == "disabled":
            raise ConfigError(
                "gnmr.mode: disabled measures nothing; do not attach, or take monitor or active"
            )
        try:
            self._controller = Controller(config, units, recorded=recorded_decisions(config))
        except ValueError as error:
            raise ConfigError(f"gnmr.trace: {config.trace}: {error}") from error
        self.step = 0
        self.measured: MeasuredStep | None = None

    @property
    def recovery_set(self) -> IntArray:
        """Unit indices on the recovery path in the coming step."""
        return self._controller.recovery_set

    @property
    def recovered(self) -> list[str]:
        """Names of the units on the recovery path in the coming step."""
        return [self._controller.units.ids[index] for index in self.recovery_set]

    def take(self, norms: FloatArray, global_norm: float, *, updated: bool) -> MeasuredStep:
        """Decide over the next step of the host.

        Args:
            norms: [units] float64 gradient norms, unscaled, before clipping.
            global_norm: over all parameters of the model.
            updated: whether the host takes the step.
        """
        recovered = self.recovery_set
        self.step += 1
        started = time.perf_counter()
        decision = self._controller.decide(norms, step=self.step, updated=updated)
        self.measured = MeasuredStep(
            decision, norms, global_norm, recovered, time.perf_counter() - started
        )
        return self.measured

    def skip(self) -> None:
        """Count a step that the host skipped without measuring; the recovery set stays."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """All that resumes, in plain values."""
        return {"step": self.step, "controller": self._controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            CheckpointError: the state is of other units or settings, or no state of a controller.
        """
        try:
            self._controller.load_state_dict(state["controller"])
            self.step = int(state["step"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved state of control does not fit: {error}; start control anew by loading none"
            ) from error
