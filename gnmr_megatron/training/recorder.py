"""Tell observers what happened: events to the log and the trackers, norms to the risk matrix."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from gnmr_megatron.analysis.report import write_report
from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.schedules import value_at
from gnmr_megatron.control.statistics import IntArray
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.observability.decisions import decision_event, risk_of
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FaultEvent,
    FinishEvent,
    RecoveryGapEvent,
    StartEvent,
    StepEvent,
)
from gnmr_megatron.observability.risk_matrix import MATRIX, RiskMatrixWriter
from gnmr_megatron.observability.spikes import SpikeDetector
from gnmr_megatron.observability.trackers import Tracker, make_trackers
from gnmr_megatron.training.checkpoint import SavedCheckpoint
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.evaluation import HeldOutLoss
from gnmr_megatron.training.oracle import RecoveryGaps
from gnmr_megatron.training.run_folder import RunFolder
from gnmr_megatron.training.state import TrainState
from gnmr_megatron.training.step import StepResult


class RecordsRun(Protocol):
    """What the loop tells; every rank calls it, one rank writes."""

    folder: Path | None

    def step(
        self, state: TrainState, result: StepResult, recovered: IntArray, *, seconds: float
    ) -> None:
        """A step is done; `recovered` are the units that ran on the recovery path in it."""

    def evaluation(self, step: int, result: HeldOutLoss) -> None:
        """Held-out loss was measured."""

    def recovery_gaps(self, step: int, gaps: RecoveryGaps, seconds: float) -> None:
        """The recovery gap of each unit was measured, in so many seconds."""

    def checkpoint(self, saved: SavedCheckpoint, *, kind: str) -> None:
        """A checkpoint was written."""

    def fault(
        self,
        step: int,
        *,
        kind: str,
        message: str,
        rank: int | None = None,
        units: Sequence[str] = (),
    ) -> None:
        """Something went wrong; `rank` where it concerns one."""

    def finish(self, state: TrainState, *, reason: str) -> None:
        """The run ends."""

    def close(self) -> None:
        """Flush and let go of files and trackers."""


class NullRecorder:
    """Writes nothing: the recorder of all ranks but one."""

    folder: Path | None = None

    def step(
        self, state: TrainState, result: StepResult, recovered: IntArray, *, seconds: float
    ) -> None:
        """Nothing."""

    def evaluation(self, step: int, result: HeldOutLoss) -> None:
        """Nothing."""

    def recovery_gaps(self, step: int, gaps: RecoveryGaps, seconds: float) -> None:
        """Nothing."""

    def checkpoint(self, saved: SavedCheckpoint, *, kind: str) -> None:
        """Nothing."""

    def fault(
        self,
        step: int,
        *,
        kind: str,
        message: str,
        rank: int | None = None,
        units: Sequence[str] = (),
    ) -> None:
        """Nothing."""

    def finish(self, state: TrainState, *, reason: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class RunRecorder:
    """Writes the run folder: events.jsonl, risk_matrix.bin, units.json; and feeds console and W&B."""

    def __init__(
        self,
        folder: Path,
        *,
        units: UnitTable,
        log: EventLog,
        matrix: RiskMatrixWriter | None,
        trackers: Tracker,
    ) -> None:
        self.folder: Path | None = folder
        self._units, self._log, self._matrix, self._trackers = units, log, matrix, trackers
        self._seconds = 0.0
        self._last_selected: list[int] = []
        self._spikes = SpikeDetector()
        self._lock = threading.RLock()
        self._unwritten_since: int | None = None
        self._last_loss = float("nan")

    @classmethod
    def open(
        cls,
        config: RunConfig,
        folder: RunFolder,
        units: UnitTable,
        state: TrainState,
        *,
        vocab_size: int,
        world_size: int,
        environment: Mapping[str, str],
    ) -> RunRecorder:
        """Open the files of a run, cut back to the step it resumes from, and announce the start."""
        has_norms = config.gnmr.mode != "disabled"
        matrix = None
        if folder.is_resumed:
            log = EventLog.resume(folder.path, state.step)
            if has_norms or (folder.path / MATRIX).exists():  # steps taken again may have none
                matrix = RiskMatrixWriter.resume(folder.path, units, state.step)
        else:
            log = EventLog(folder.path)
            if has_norms:
                matrix = RiskMatrixWriter(folder.path, units)
        if matrix is not None and not has_norms:
            matrix.close()
            matrix = None
        recorder = cls(
            folder.path,
            units=units,
            log=log,
            matrix=matrix,
            trackers=make_trackers(
                folder.path,
                config.tracking,
                run_config=dataclasses.asdict(config),
                write_report=write_report,
            ),
        )
        recorder._record(
            StartEvent(
                run=folder.path.name,
                step=state.step + 1,
                resumed_from=str(folder.checkpoints / f"step_{state.step:08d}")
                if state.step
                else None,
                world_size=world_size,
                layout=dataclasses.asdict(config.parallel),
                num_parameters=config.model.num_parameters(vocab_size),
                num_units=len(units),
                max_recovered=int(value_at(config.gnmr.max_recovered, state.step + 1)),
                total_steps=config.train.steps,
                policy=config.gnmr.policy,
                mode=config.gnmr.mode,
                control=dataclasses.asdict(config.gnmr),
                environment=dict(environment),
            )
        )
        if log.broken_off_after is not None:
            dead = range(state.step + 1, log.broken_off_after + 1)
            again = f"; steps {dead[0]} to {dead[-1]} are taken again" if dead else ""
            recorder.fault(
                state.step,
                kind="restart",
                message=f"the attempt before ended in or after step {log.broken_off_after} without a finish{again}",
            )
        return recorder

    def step(
        self, state: TrainState, result: StepResult, recovered: IntArray, *, seconds: float
    ) -> None:
        """Write the step, its norms, and its decision where there is one to tell."""
        decision, loss = result.decision, result.batch.loss
        self._seconds += seconds
        self._last_loss = loss
        if self._matrix is not None:  # before the event: trackers read the step's record
            append = partial(
                self._matrix.append,
                step=state.step,
                updated=result.updated,
                global_norm=result.norms.global_norm,
                norms=result.norms.per_unit,
                gnmr=decision.gnmr,
                delta_gnmr=decision.delta_gnmr,
                recovered=recovered,
                selected=decision.selected,
            )
            self._to_disk(state.step, append)
        risk = risk_of(decision, self._units)
        self._record(
            StepEvent(
                step=state.step,
                loss=loss,
                grad_norm=result.norms.global_norm,
                learning_rate=result.learning_rate,
                tokens=state.consumed_tokens,
                tokens_per_second=result.batch.tokens / seconds,
                step_seconds=seconds,
                control_seconds=result.control_seconds,
                recovered=[self._units.ids[index] for index in recovered],
                max_recovered=decision.max_recovered,
                updated=result.updated,
                over_threshold=risk.over_threshold,
                riskiest_unit=risk.unit,
                riskiest_score=risk.score,
            )
        )
        self._decision(decision)
        expected = self._spikes.threshold()
        if self._spikes.add(loss):
            self.fault(
                state.step,
                kind="loss_spike",
                units=[self._units.ids[index] for index in decision.selected],
                message=f"loss {loss:.4f} is above {expected:.4f}, the mean of the last steps and 6 deviations; units "
                "are those that recover from the next step on",
            )

    def evaluation(self, step: int, result: HeldOutLoss) -> None:
        """Write the held-out loss."""
        self._record(
            EvaluationEvent(
                step=step,
                loss=result.loss,
                perplexity=result.perplexity,
                tokens=result.tokens,
                seconds=result.seconds,
            )
        )

    def recovery_gaps(self, step: int, gaps: RecoveryGaps, seconds: float) -> None:
        """Write what was measured."""
        self._record(
            RecoveryGapEvent(
                step=step,
                gaps=gaps.per_unit.tolist(),
                error=gaps.error,
                reference=gaps.reference,
                seconds=seconds,
            )
        )

    def checkpoint(self, saved: SavedCheckpoint, *, kind: str) -> None:
        """Write where the checkpoint lies."""
        self._record(
            CheckpointEvent(
                step=saved.step,
                path=str(saved.path),
                seconds=saved.seconds,
                blocked_seconds=saved.blocked_seconds,
                bytes=saved.num_bytes,
                kind=kind,
            )
        )

    def fault(
        self,
        step: int,
        *,
        kind: str,
        message: str,
        rank: int | None = None,
        units: Sequence[str] = (),
    ) -> None:
        """Write what went wrong."""
        self._record(
            FaultEvent(step=step, kind=kind, rank=rank, units=list(units), message=message)
        )

    def finish(self, state: TrainState, *, reason: str) -> None:
        """Write the end, with the summary of the run so far."""
        self._record(
            FinishEvent(
                step=state.step,
                reason=reason,
                loss=self._last_loss,
                seconds=self._seconds,
                tokens=state.consumed_tokens,
            )
        )

    def close(self) -> None:
        """Close files and trackers."""
        self._trackers.close()
        self._log.close()
        if self._matrix is not None:
            self._matrix.close()

    def _decision(self, decision: Decision) -> None:
        selected = decision.selected.tolist()
        if selected or self._last_selected:
            self._record(decision_event(decision, self._units))
        self._last_selected = selected

    def _record(self, event: Event) -> None:
        with self._lock:  # the watchdog's thread tells of faults, too
            self._to_disk(event.step, partial(self._log.append, event))
            self._trackers.record(event)

    def _to_disk(self, step: int, write: Callable[[], None]) -> None:
        """Write to a file of the run; what a full disk does not take waits in memory, and is told once."""
        try:
            write()
        except OSError as error:
            if self._unwritten_since is None:
                self._unwritten_since = step
                self.fault(
                    step,
                    kind="disk_full",
                    message=f"the run folder cannot be written ({error}); training goes on, records wait in memory",
                )
        else:
            self._unwritten_since = None
