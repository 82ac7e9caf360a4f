"""megatron-core's AdamW, with clipping by a norm that is already known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.training.config import OptimizerSettings


class ClippingOptimizer:
    """The engine's optimizer, stepped in parts so that the unit norms come between them.

    Important:
        Each step calls `prepare_grads`, then `clip_and_step` if the step is to be taken.

    Args:
        engine: megatron-core optimizer.
        clip_grad: largest gradient norm; 0 for no clipping.
    """

    def __init__(self, engine: Any, *, clip_grad: float) -> None:
        self.engine = engine
        self._clip_grad = clip_grad

    def zero_grad(self) -> None:
        """Let go of the gradients of the last step."""
        self.engine.zero_grad()

    def prepare_grads(self) -> bool:
        """Hand the reduced gradients to the optimizer; returns whether the engine found them not finite."""
        return bool(self.engine.prepare_grads())

    def clip_and_step(self, global_norm: float) -> bool:
        """Clip by the norm of the whole model and update the weights; returns whether it did."""
        if self._clip_grad > 0:
            engine_compat.clip_gradients(
                self.engine, max_norm=self._clip_grad, total_norm=global_norm
            )
        return bool(self.engine.step_with_ready_grads())

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate of the next update; the scheduler sets it anew after that."""
        for group in self.engine.param_groups:
            group["lr"] *= factor

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return float(self.engine.param_groups[0]["lr"])


def build_optimizer(
    chunks: Sequence[torch.nn.Module],
    settings: OptimizerSettings,
    layout: ParallelLayout,
    dtype: torch.dtype,
) -> ClippingOptimizer:
    """AdamW over DDP-wrapped model chunks; FP32 main parameters where the model is BF16."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
    )
    return ClippingOptimizer(
        get_megatron_optimizer(config, list(chunks)), clip_grad=settings.clip_grad
    )


def build_scheduler(
    optimizer: ClippingOptimizer, settings: OptimizerSettings, *, steps: int
) -> OptimizerParamScheduler:
    """Warm-up and cosine decay, counted in steps; the first step runs at lr / warmup_steps, not at 0."""
    decay_steps = settings.decay_steps or steps
    scheduler = OptimizerParamScheduler(
        optimizer.engine,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # on resume the settings count, not what the checkpoint had
    )
    scheduler.step(1)
    return scheduler
