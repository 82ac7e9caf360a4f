"""The run folder of a run that another trainer makes."""

from __future__ import annotations

import dataclasses
import platform
import time
from importlib.metadata import version
from pathlib import Path

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.schedules import value_at
from gnmr_megatron.control.statistics import FloatArray, IntArray
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.observability.decisions import decision_event, risk_of
from gnmr_megatron.observability.event_log import FILE, EventLog
from gnmr_megatron.observability.events import FinishEvent, StartEvent, StepEvent
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """One step of the host, as control saw it.

    Attributes:
        decision: recovery set of the next step, and why.
        norms: [units] float64.
        global_norm: over all parameters.
        recovered: int64 indices of the units that ran on the recovery path in this step.
        control_seconds: time to decide.
    """

    decision: Decision
    norms: FloatArray
    global_norm: float
    recovered: IntArray
    control_seconds: float


class RunRecord:
    """Writes events.jsonl, risk_matrix.bin and units.json; on one rank only.

    Files are opened at the first step, since only then it is known whether the run goes on from a checkpoint. Lines and
    records of later steps, which the run had taken before, are then superseded.

    Args:
        folder: of this run alone.
        config: settings of the controller.
        units: of the whole model.
        host: name of the trainer.
        world_size: processes of the run.
        num_parameters: of the whole model; None where that is not known.
        total_steps: last step of the run; 0 where that is not known.
    """

    def __init__(
        self,
        folder: Path,
        config: ControlConfig,
        units: UnitTable,
        *,
        host: str,
        world_size: int,
        num_parameters: int | None,
        total_steps: int,
    ) -> None:
        self.total_steps = total_steps
        self._folder, self._config, self._units = folder, config, units
        self._host, self._world_size, self._num_parameters = host, world_size, num_parameters
        self._files: tuple[EventLog, RiskMatrixWriter] | None = None
        self._written_at = time.perf_counter()
        self._seconds, self._last_loss, self._had_selected = 0.0, float("nan"), False

    def write(self, measured: MeasuredStep, *, loss: float, learning_rate: float) -> None:
        """Write a step, its norms, and its decision where there is one to tell.

        Args:
            measured: the step.
            loss: its training loss; NaN where the host does not tell.
            learning_rate: its learning rate; NaN where the host does not tell.
        """
        decision, names = measured.decision, self._units.ids
        log, matrix = self._files or self._open(decision.step)
        seconds = time.perf_counter() - self._written_at
        self._written_at += seconds
        self._seconds, self._last_loss = self._seconds + seconds, loss
        risk = risk_of(decision, self._units)
        log.append(
            StepEvent(
                step=decision.step,
                loss=loss,
                grad_norm=measured.global_norm,
                learning_rate=learning_rate,
                tokens=0,
                tokens_per_second=0.0,
                step_seconds=seconds,
                control_seconds=measured.control_seconds,
                recovered=[names[index] for index in measured.recovered],
                max_recovered=decision.max_recovered,
                updated=decision.updated,
                over_threshold=risk.over_threshold,
                riskiest_unit=risk.unit,
                riskiest_score=risk.score,
            )
        )
        if len(decision.selected) or self._had_selected:
            log.append(decision_event(decision, self._units))
        self._had_selected = len(decision.selected) > 0
        matrix.append(
            step=decision.step,
            updated=decision.updated,
            global_norm=measured.global_norm,
            norms=measured.norms,
            gnmr=decision.gnmr,
            delta_gnmr=decision.delta_gnmr,
            recovered=measured.recovered,
            selected=decision.selected,
        )

    def close(self, step: int) -> None:
        """Write that the run is completed and close the files; a later step opens them again."""
        if self._files is None:
            return
        log, matrix = self._files
        log.append(
            FinishEvent(
                step=step, reason="completed", loss=self._last_loss, seconds=self._seconds, tokens=0
            )
        )
        log.close()
        matrix.close()
        self._files = None

    def _open(self, step: int) -> tuple[EventLog, RiskMatrixWriter]:
        if step == 1 and (self._folder / FILE).exists():
            raise ConfigError(
                f"folder: {self._folder} holds a run already; name another folder, or load the state of that run"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        log = EventLog.resume(self._folder, step - 1)
        matrix = RiskMatrixWriter.resume(self._folder, self._units, step - 1)
        log.append(self._start(step))
        self._files = log, matrix
        return self._files

    def _start(self, step: int) -> StartEvent:
        return StartEvent(
            run=self._folder.resolve().name,
            step=step,
            resumed_from=None if step == 1 else f"a checkpoint of {self._host} at step {step - 1}",
            world_size=self._world_size,
            layout={},
            num_parameters=self._num_parameters,
            num_units=len(self._units),
            max_recovered=int(value_at(self._config.max_recovered, step)),
            total_steps=self.total_steps,
            policy=self._config.policy,
            mode=self._config.mode,
            control=dataclasses.asdict(self._config),
            environment={
                "python": platform.python_version(),
                "torch": version("torch"),
                "gnmr_megatron": version("gnmr-megatron"),
                "trainer": self._host,
                "host": platform.node(),
            },
        )
