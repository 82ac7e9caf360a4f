"""Control in Hugging Face's Trainer: `attach(trainer, config, precision)` before `trainer.train()`.

    from gnmr_megatron import ControlConfig
    from gnmr_megatron.integrations.huggingface_trainer import attach
    from gnmr_megatron.precision.config import PrecisionConfig

    attach(trainer, ControlConfig(), PrecisionConfig(low="saved_int4", recovery="saved_int8"))
    trainer.train()

The Trainer clips before it calls `on_pre_optimizer_step`, and that cannot be undone: the norm after clipping is the
limit, whatever it was before. So norms are measured within `accelerator.clip_grad_norm_`, which the Trainer calls once
a step, after the last backward pass, also where it does not clip.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType  # type: ignore[import-untyped]
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError, EngineError
from gnmr_megatron.integrations import torch_module
from gnmr_megatron.integrations.torch_module import ModuleControl
from gnmr_megatron.precision.config import PrecisionConfig


class GnmrCallback(TrainerCallback, ExportableState):
    """Decides at each optimizer step of a Trainer; made by `attach`.

    Its state lies in `trainer_state.json` of each checkpoint, and a resumed run goes on with it.

    Attributes:
        module: control over the model's linears.
    """

    def __init__(self, trainer: Trainer, module: ModuleControl) -> None:
        self.module = module
        self._trainer = trainer
        self._fresh = module.state_dict()
        self._loss, self._is_written = math.nan, True
        self._recovered = self._over_threshold = 0  # unit-steps since the last log
        self._trainer_log = trainer.log
        trainer.log = self._log  # type: ignore[method-assign]  # made to be overridden

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"args": {}, "attributes": {"control": self.module.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start anew, or where the checkpoint stood.

        Raises:
            CheckpointError: the checkpoint is of other units or settings.
        """
        name = type(self).__name__
        all_saved: Any = state.stateful_callbacks  # a dict by now, whatever its annotation says
        saved = all_saved.get(name)
        if state.global_step == 0:
            self.module.load_state_dict(self._fresh)
        elif saved is not None:
            self.module.load_state_dict(saved["attributes"]["control"])
        else:  # a checkpoint of a run without control
            self.module.load_state_dict(self._fresh)
            self.module.start_at(state.global_step)
        all_saved[name] = self.state()  # the Trainer saves what it finds here
        self.module.expect_steps(state.max_steps)
        self._measure_before_clipping()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Make sure that the step was measured.

        Raises:
            EngineError: gradients were clipped by another way than accelerate's.
        """
        if self.module.steps_taken != state.global_step + 1:
            raise EngineError(
                f"step {state.global_step + 1}: the Trainer did not call accelerator.clip_grad_norm_, so norms before "
                "clipping are not known; gradients on several device meshes and optimizers that clip by themselves "
                "are not supported"
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write the step before, whose loss is known now if it was logged."""
        self._write()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write the last step, and the end."""
        self._write()
        self.module.close()

    def _measure_before_clipping(self) -> None:
        accelerator = self._trainer.accelerator
        clip = accelerator.clip_grad_norm_
        if isinstance(clip, _MeasuresFirst):
            return
        accelerator.clip_grad_norm_ = _MeasuresFirst(clip, self)

    def measure(self) -> None:
        """Decide over the next step; gradients are complete, still scaled and not yet clipped."""
        measured = self.module.decide(scaler=self._trainer.accelerator.scaler)
        decision = measured.decision
        self._recovered += len(measured.recovered)
        self._over_threshold += int((decision.candidate & (decision.score > 1)).sum())
        self._loss, self._is_written = math.nan, False

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self._loss = logs["loss"]
            logs["gnmr_recovered"] = self._recovered
            logs["gnmr_over_threshold"] = self._over_threshold
            self._recovered = self._over_threshold = 0
        self._trainer_log(logs, *args, **kwargs)

    def _write(self) -> None:
        if not self._is_written:
            self._is_written = True
            self.module.write(loss=self._loss)


class _MeasuresFirst:
    """`clip_grad_norm_` of an accelerator, behind a measurement."""

    def __init__(self, clip: Any, callback: GnmrCallback) -> None:
        functools.update_wrapper(self, clip)
        self._clip, self._callback = clip, callback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._callback.measure()
        return self._clip(*args, **kwargs)


def attach(
    trainer: Trainer,
    config: ControlConfig | None = None,
    precision: PrecisionConfig | None = None,
    *,
    units: str = "*_proj",
    folder: str | Path | None = None,
) -> GnmrCallback:
    """Let control decide at each optimizer step of a Trainer.

    Logs get `gnmr_recovered`, unit-steps on the recovery path since the last log, and `gnmr_over_threshold`.

    Args:
        trainer: before `train`; on one device, under DDP or under FSDP 2.
        config: settings of the controller.
        precision: the two paths of each unit; None leaves the linears alone, in mode `monitor`.
        units: glob on the names of the units; those of the LLaMA family by default.
        folder: run folder to write, on the first rank. A step has the loss that was logged after it, so losses are
            complete with `logging_steps=1`.

    Raises:
        ConfigError: the model or the Trainer cannot do what is asked; the message says what to do.
    """
    if trainer.args.restore_callback_states_from_checkpoint:
        raise ConfigError(
            "restore_callback_states_from_checkpoint: makes callbacks anew without their model; leave it off, "
            "control restores itself"
        )
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ConfigError("DeepSpeed clips by itself, and hides gradients; use DDP or FSDP 2")
    if trainer.args.torch_compile:
        raise ConfigError(
            "torch_compile: would compile the paths of the first step in; leave it off"
        )
    model = trainer.model
    assert isinstance(model, torch.nn.Module)
    module = torch_module.attach(
        model, config, precision, units=units, folder=folder, host="Hugging Face Trainer"
    )
    callback = GnmrCallback(trainer, module)
    trainer.add_callback(callback)
    return callback
