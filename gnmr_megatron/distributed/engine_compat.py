"""Every use of a megatron-core 0.16.1 detail that another version may change."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import param_is_not_shared

from gnmr_megatron.errors import EngineError

TESTED = "0.16.1"


def check_engine() -> None:
    """Refuse a megatron-core whose private names may differ.

    Raises:
        EngineError: another version is installed.
    """
    installed = version("megatron-core")
    if installed != TESTED:
        raise EngineError(
            f"megatron-core {installed} is installed, but {TESTED} is needed: pip install megatron-core=={TESTED}"
        )


def device_fields(device_type: str) -> dict[str, Any]:
    """Fields of `TransformerConfig` that depend on the device, `cpu` or `cuda`."""
    is_cpu = device_type == "cpu"
    return {
        "use_cpu_initialization": True,  # weights are drawn by name on the CPU in any case
        # gloo reads a sent tensor after isend returned; freeing it then corrupts what the other side gets
        "deallocate_pipeline_outputs": not is_cpu,
        # torch.compile: 12 s of g++ on a CPU
        "bias_activation_fusion": not is_cpu,
        "bias_dropout_fusion": not is_cpu,
        "persist_layer_norm": False,
    }


def single_optimizers(optimizer: Any) -> Sequence[Any]:
    """The optimizers inside a ChainedOptimizer, or the one given."""
    chained: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return chained


def is_contributed_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this tensor-parallel rank, and not a duplicate, speaks for the parameter's gradient."""
    return bool(
        param_is_not_shared(parameter)
        and tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter)
    )


def uses_distributed_optimizer(optimizer: Any) -> bool:
    """Whether the optimizer's state is sharded over the data-parallel ranks."""
    return any(hasattr(single, "model_param_gbuf_map") for single in single_optimizers(optimizer))


def owned_range(optimizer: Any, parameter: torch.nn.Parameter) -> slice | None:
    """Elements of a parameter whose reduced gradient this rank of a distributed optimizer holds."""
    for single in single_optimizers(optimizer):
        if parameter in getattr(single, "model_param_gbuf_map", {}):
            shard = single._get_model_param_range_map(parameter)["param"]
            return slice(shard.start, shard.end)
    return None


def clip_gradients(optimizer: Any, *, max_norm: float, total_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`, given the norm of the whole model."""
    for single in single_optimizers(optimizer):
        if getattr(single, "is_stub_optimizer", False):
            continue
        parameters = single.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm)
