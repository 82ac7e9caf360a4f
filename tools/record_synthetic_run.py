"""Writes a run folder of any size without training: random norms, decided by the real controller.

Norms are the product of a slow decay, a shared and an own AR(1) noise, and rare shocks with a tail; losses fall as a
power of the step, with noise and rare spikes. For tests and for measuring what reads run folders.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller, Decision
from gnmr_megatron.control.statistics import FloatArray
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    DecisionEvent,
    EvaluationEvent,
    FaultEvent,
    FinishEvent,
    SelectedUnit,
    StartEvent,
    StepEvent,
)
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter
from gnmr_megatron.observability.spikes import SpikeDetector

OPERATORS = {
    "self_attention.linear_qkv": (96, 64),
    "self_attention.linear_proj": (64, 64),
    "mlp.linear_fc1": (256, 64),
    "mlp.linear_fc2": (64, 128),
}
BLOCK = 1024  # steps whose random numbers are drawn at once


def make_units(num_layers: int) -> UnitTable:
    """Four operators a layer."""
    return UnitTable(
        Unit(layer, position, f"decoder.layers.{layer}.{operator}", shape)
        for layer in range(num_layers)
        for position, (operator, shape) in enumerate(OPERATORS.items())
    )


def norms_of_steps(
    num_units: int, steps: int, *, seed: int, shocks: float
) -> Iterator[tuple[FloatArray, bool]]:
    """The norms of each step, and whether its loss spikes."""
    draw = np.random.default_rng(seed)
    size = np.exp(draw.normal(0, 0.5, num_units)) / np.sqrt(num_units)
    own, shared, shock = np.zeros(num_units), 0.0, np.zeros(num_units)
    for first in range(0, steps, BLOCK):
        noise = draw.normal(0, 1, (BLOCK, num_units + 1))
        hits = draw.random((BLOCK, num_units)) < shocks
        heights = draw.exponential(1.0, (BLOCK, num_units)) + 0.7
        for row in range(min(BLOCK, steps - first)):
            own = 0.6 * own + 0.16 * noise[row, 1:]
            shared = 0.9 * shared + 0.03 * noise[row, 0]
            shock = 0.6 * shock + hits[row] * heights[row]
            decay = (1 + (first + row) / 200) ** -0.35
            is_spike = bool((hits[row] * heights[row]).max() > 5)
            yield size * decay * np.exp(own + shared + shock), is_spike


class _Recording:
    """Writes what training would have written."""

    def __init__(self, folder: Path, units: UnitTable, config: ControlConfig, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._units, self._config, self._steps = folder, units, config, steps
        self._log = EventLog(folder)
        self._matrix = RiskMatrixWriter(folder, units)
        self._controller = Controller(config, units)
        self._spikes = SpikeDetector()
        self._had_selected = False
        self._time = 1.8e9
        self.locked: list[int] = []

    def run(self, *, seed: int, shocks: float) -> None:
        self._start()
        draw = np.random.default_rng(seed + 1)
        spike, loss = 0.0, 0.0
        norms = norms_of_steps(len(self._units), self._steps, seed=seed, shocks=shocks)
        for step, (values, is_spike) in enumerate(norms, start=1):
            spike = 0.7 * spike + is_spike * draw.uniform(0.8, 2.5)
            loss = 1.9 + 8.0 * (step + 20) ** -0.28 + 0.03 * draw.normal() + spike
            self._step(step, values, loss, seconds=8.0 + 0.2 * draw.exponential())
            if step % max(self._steps // 20, 1) == 0:
                self._log.append(
                    EvaluationEvent(
                        step=step,
                        time=self._time,
                        loss=loss + 0.1,
                        perplexity=float(np.exp(loss + 0.1)),
                        tokens=8192,
                        seconds=1.0,
                    )
                )
                self._log.append(
                    CheckpointEvent(
                        step=step,
                        time=self._time,
                        path=f"checkpoints/step_{step:08d}",
                        seconds=9.0,
                        bytes=10**9,
                        kind="periodic",
                        blocked_seconds=0.4,
                    )
                )
        self._log.append(
            FinishEvent(
                step=self._steps,
                time=self._time,
                reason="completed",
                loss=loss,
                seconds=self._time - 1.8e9,
                tokens=self._steps * 4194304,
            )
        )
        self._log.close()
        self._matrix.close()

    def _start(self) -> None:
        self._log.append(
            StartEvent(
                step=1,
                time=self._time,
                run=self._folder.name,
                resumed_from=None,
                world_size=64,
                layout={"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4},
                num_units=len(self._units),
                max_recovered=1,
                total_steps=self._steps,
                policy=self._config.policy,
                mode=self._config.mode,
                environment={"python": "3.11.7", "device": "synthetic"},
                num_parameters=13_015_864_320,
                control=dataclasses.asdict(self._config),
            )
        )

    def _step(self, step: int, norms: FloatArray, loss: float, *, seconds: float) -> None:
        recovered = self._controller.recovery_set
        decision = self._controller.decide(norms, step=step)
        self.locked.append(int((decision.lock > 0).sum()))
        self._time += seconds
        riskiest = int(np.argmax(decision.score))
        global_norm = float(np.sqrt((norms**2).sum()))
        self._log.append(
            StepEvent(
                step=step,
                time=self._time,
                loss=loss,
                grad_norm=global_norm,
                learning_rate=3e-4,
                tokens=step * 4194304,
                tokens_per_second=4194304 / seconds,
                step_seconds=seconds,
                control_seconds=2e-4,
                recovered=[self._units.ids[index] for index in recovered],
                updated=True,
                over_threshold=int((decision.candidate & (decision.score > 1)).sum()),
                riskiest_unit=self._units.ids[riskiest],
                riskiest_score=float(decision.score[riskiest]),
                max_recovered=decision.max_recovered,
            )
        )
        self._decision(decision)
        expected = self._spikes.threshold()
        if self._spikes.add(loss):
            message = f"loss {loss:.4f} is above {expected:.4f}, the mean of the last steps and 6 deviations"
            self._log.append(
                FaultEvent(
                    step=step,
                    time=self._time,
                    kind="loss_spike",
                    rank=None,
                    units=[],
                    message=message,
                )
            )
        self._matrix.append(
            step=step,
            updated=True,
            global_norm=global_norm,
            norms=norms,
            gnmr=decision.gnmr,
            delta_gnmr=decision.delta_gnmr,
            recovered=recovered,
            selected=decision.selected,
        )

    def _decision(self, decision: Decision) -> None:
        selected = decision.selected.tolist()
        if selected or self._had_selected:
            units = [
                SelectedUnit(
                    unit=self._units.ids[index],
                    gnmr=float(decision.gnmr[index]),
                    delta_gnmr=float(decision.delta_gnmr[index]),
                    score=float(decision.score[index]),
                    lock=int(decision.lock[index]),
                    reason=decision.reason(index),
                )
                for index in selected
            ]
            self._log.append(DecisionEvent(step=decision.step, time=self._time, selected=units))
        self._had_selected = bool(selected)


def record(
    folder: Path,
    *,
    num_layers: int,
    steps: int,
    config: ControlConfig | None = None,
    seed: int = 0,
    shocks: float = 3e-4,
) -> list[int]:
    """Write a run folder.

    Args:
        folder: made where there is none; must hold no run.
        num_layers: of four units each.
        steps: of the run.
        config: settings of the controller.
        seed: of norms and losses.
        shocks: chance of a shock, for each unit and step.

    Returns:
        For each step the number of units with a lock after its decision.
    """
    config = config or ControlConfig(max_recovered=2)
    recording = _Recording(folder, make_units(num_layers), config, steps)
    recording.run(seed=seed, shocks=shocks)
    return recording.locked


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    record(options.folder, num_layers=options.layers, steps=options.steps, seed=options.seed)
