"""Runs recorded by the real controller, log and matrix, without a trainer."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import FaultEvent, StartEvent, StepEvent
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter

OPERATORS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def unit_table(count, *, rename: Mapping[int, str] | None = None):
    """`count` units, four a layer."""
    return UnitTable(
        Unit(
            i // 4,
            i % 4,
            (rename or {}).get(i, f"decoder.layers.{i // 4}.{OPERATORS[i % 4]}"),
            (8, 8),
        )
        for i in range(count)
    )


@dataclass
class Attempt:
    """Settings from a step on, as after a resume; `restarts` where the batch size changed."""

    first_step: int
    config: ControlConfig
    restarts: bool = False


def lively_norms(steps, count, *, seed=0):
    """Norms with shocks that last some steps, so that budget and locks have something to do."""
    rng = np.random.default_rng(seed)
    norms = rng.lognormal(sigma=0.15, size=(steps, count))
    for step, unit in zip(
        rng.integers(5, steps, steps // 6), rng.integers(0, count, steps // 6), strict=True
    ):
        norms[step : step + 3, unit] *= rng.uniform(1.5, 6.0)
    return norms


def record(
    folder: Path,
    norms,
    attempts: ControlConfig | Sequence[Attempt],
    *,
    updated=None,
    units: UnitTable | None = None,
    trace: Mapping[int, Sequence[str]] | None = None,
    step_events: bool = True,
):
    """Write the folder of a run that saw these norms, as the trainer does; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    steps, count = norms.shape
    units = units or unit_table(count)
    if isinstance(attempts, ControlConfig):
        attempts = [Attempt(1, attempts)]
    updated = np.ones(steps, dtype=bool) if updated is None else updated
    log, matrix = EventLog(folder), RiskMatrixWriter(folder, units)
    ends = [attempt.first_step for attempt in attempts[1:]] + [steps + 1]
    controller = None
    for attempt, end in zip(attempts, ends, strict=True):
        log.append(_start(folder, attempt, count, steps))
        if attempt.config.mode == "disabled":
            controller = None
            continue
        former, controller = controller, Controller(attempt.config, units, recorded=trace)
        if former is not None:
            controller.load_state_dict(former.state_dict())
        if attempt.restarts:
            controller.restart_history()
            log.append(
                FaultEvent(
                    step=attempt.first_step - 1,
                    kind="history_restart",
                    rank=None,
                    units=[],
                    message="batch size changed",
                )
            )
        for step in range(attempt.first_step, end):
            row, recovered = norms[step - 1], controller.recovery_set
            decision = controller.decide(row, step=step, updated=bool(updated[step - 1]))
            if step_events:
                log.append(_step(step, decision, [units.ids[i] for i in recovered]))
            matrix.append(
                step=step,
                updated=bool(updated[step - 1]),
                global_norm=float(np.sqrt(np.nansum(row**2))),
                norms=row,
                gnmr=decision.gnmr,
                delta_gnmr=decision.delta_gnmr,
                recovered=recovered,
                selected=decision.selected,
            )
    log.close()
    matrix.close()
    return folder


def _start(folder, attempt, count, steps):
    return StartEvent(
        step=attempt.first_step,
        run=folder.name,
        resumed_from=None,
        world_size=1,
        layout={},
        num_units=count,
        max_recovered=0,
        total_steps=steps,
        policy=attempt.config.policy,
        mode=attempt.config.mode,
        environment={},
        control=dataclasses.asdict(attempt.config),
    )


def _step(step, decision, recovered):
    return StepEvent(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=step,
        tokens_per_second=1.0,
        step_seconds=1.0,
        control_seconds=0.0,
        recovered=recovered,
        updated=decision.updated,
        over_threshold=int(np.count_nonzero(decision.candidate & (decision.score > 1))),
        riskiest_unit=None,
        riskiest_score=0.0,
    )
