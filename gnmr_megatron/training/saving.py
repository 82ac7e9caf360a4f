"""When to save, and what becomes of a save: written while training goes on, finished when all ranks have written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.training.checkpoint import Checkpointer
from gnmr_megatron.training.config import CheckpointSettings
from gnmr_megatron.training.recorder import RecordsRun
from gnmr_megatron.training.state import TrainState

SaveKind = Literal["periodic", "signal", "final"]


@dataclass
class Saving:
    """Saves at intervals; a save that fails is told and leaves training on the checkpoint before.

    Important:
        All ranks call each method after the same step.
    """

    settings: CheckpointSettings
    checkpointer: Checkpointer
    recorder: RecordsRun
    saved_step: int
    progress: Callable[[], None] = lambda: None
    """Called while a save is waited for, as long as its files grow."""
    _running_kind: SaveKind = field(default="periodic", init=False)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes."""
        return self.checkpointer.is_writing

    def after_step(self, state: TrainState, *, anyone_writes: bool) -> None:
        """Finish what all ranks have written, and begin a save where one is due.

        Args:
            state: after the step.
            anyone_writes: whether any rank was still writing at the beginning of the step.
        """
        if self.checkpointer.is_saving and not anyone_writes:
            self._finish(state)
        if self.settings.interval and state.step % self.settings.interval == 0:
            self._begin(state, "periodic")
            if not self.settings.asynchronous:
                self._finish(state)

    def at_end(self, state: TrainState, kind: SaveKind) -> None:
        """Finish a running save, and save the last step where that is not done.

        Raises:
            CheckpointError: the last step cannot be saved.
        """
        self._finish(state)
        if self.saved_step == state.step:
            return
        self._begin(state, kind)
        self._finish(state)
        if self.saved_step != state.step:
            raise CheckpointError(
                f"step {state.step} could not be saved (see the fault above); the run goes on from step "
                f"{self.saved_step} with --resume"
            )

    def _begin(self, state: TrainState, kind: SaveKind) -> None:
        self._finish(state)  # one save at a time
        try:
            self.checkpointer.start(state)
        except CheckpointError as error:
            self._tell(state, error)
        self._running_kind = kind

    def _finish(self, state: TrainState) -> None:
        if not self.checkpointer.is_saving:
            return
        try:
            saved = self.checkpointer.finish(self.progress)
        except CheckpointError as error:
            self._tell(state, error)
        else:
            self.saved_step = saved.step
            self.recorder.checkpoint(saved, kind=self._running_kind)

    def _tell(self, state: TrainState, error: CheckpointError) -> None:
        self.recorder.fault(
            state.step,
            kind="checkpoint_failed",
            message=f"{error}; training goes on, the last checkpoint is that of step {self.saved_step}",
        )
