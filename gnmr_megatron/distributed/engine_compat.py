"""Every use of a megatron-core 0.16.1 detail that another version may change."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
from megatron.core import optimizer as optimizer_module
from megatron.core import tensor_parallel
from megatron.core.optimizer import clip_grads
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
        "gradient_accumulation_fusion": not is_cpu and _has_fused_accumulation(),
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


def buffered_parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    """Parameters of a distributed optimizer in the order of its `fully_reshardable` state."""
    (single,) = single_optimizers(optimizer)
    return [parameter for buffer in single.buffers for parameter in buffer.param_index_map]


def tensor_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each FP32 tensor, [tensors], in one kernel: that of Transformer Engine or apex, or torch's."""
    if tensors[0].is_cuda and _fused_package(clip_grads.l2_norm_impl):
        overflow = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)
        is_per_tensor = True
        _, norms = clip_grads.multi_tensor_applier(
            clip_grads.l2_norm_impl, overflow, [list(tensors)], is_per_tensor
        )
        return norms
    return torch.stack(torch._foreach_norm(list(tensors)))


def kernels_in_use(device: torch.device) -> dict[str, str]:
    """Where kernels come from that several packages bring: `transformer_engine`, `apex` or `torch`."""
    on_gpu = device.type == "cuda"
    return {
        "adam": _fused_package(optimizer_module.Adam) or "torch",
        "norms": (on_gpu and _fused_package(clip_grads.l2_norm_impl)) or "torch",
        "gradient_accumulation": "apex" if on_gpu and _has_fused_accumulation() else "torch",
    }


@contextlib.contextmanager
def gathered_parameters(chunks: Iterable[Any]) -> Iterator[None]:
    """Within the block every rank holds all updated weights; for use between steps, by all ranks.

    With overlapped parameter gathers a rank holds only its own shard of the last update until the next forward pass
    of training, so whoever saves or evaluates would see older weights.
    """
    overlapped = [chunk for chunk in chunks if chunk.use_forward_hook]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


def adam_is_fused() -> bool:
    """Whether AdamW is that of Transformer Engine or apex, which counts updates in its groups, as torch's does not."""
    return _fused_package(optimizer_module.Adam) is not None


def _has_fused_accumulation() -> bool:
    """Whether apex's extension is there that adds weight gradients to FP32 buffers within their GEMM."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _fused_package(kernel: Any) -> str | None:
    package = str(getattr(kernel, "__module__", "")).partition(".")[0]
    return {
        "transformer_engine": "transformer_engine",
        "transformer_engine_torch": "transformer_engine",
        "apex": "apex",
        "amp_C": "apex",
    }.get(package)


def replace_norm(optimizer: Any, norm: Callable[[], float]) -> None:
    """Let `optimizer.step()` take the norm of the model's gradients from `norm`, in place of its own reduction."""

    def clip_grad_norm(max_norm: float) -> float:
        total_norm = norm()
        clip_gradients(optimizer, max_norm=max_norm, total_norm=total_norm)
        return total_norm

    optimizer.get_grad_norm = norm  # what ChainedOptimizer.step calls
    optimizer.clip_grad_norm = clip_grad_norm  # what the step of all others calls


_OPTIMIZERS = (
    "ChainedOptimizer",
    "DistributedOptimizer",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
)


def norm_problems(chunks: Sequence[Any], optimizer: Any) -> Iterator[str]:
    """Why gradient norms cannot be measured in place of the optimizer's own, and what would do."""
    for single in dict.fromkeys((optimizer, *single_optimizers(optimizer))):
        if type(single).__name__ not in _OPTIMIZERS:
            yield (
                f"the optimizer is a {type(single).__name__}; known are {', '.join(_OPTIMIZERS)}: build it with "
                "megatron-core's get_megatron_optimizer, as adam or sgd"
            )
    if not hasattr(optimizer, "chained_optimizers") and optimizer.config.clip_grad <= 0:
        yield (
            f"{type(optimizer).__name__} with clip_grad {optimizer.config.clip_grad} measures no norm; set clip_grad "
            "above 0, or put it into a ChainedOptimizer"
        )
    settings: list[Any] = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    if any(each is None or each.use_megatron_fsdp for each in settings):
        yield "the model has to be wrapped in megatron-core's DistributedDataParallel, and not in its FSDP"
        return
    if any(each.num_distributed_optimizer_instances > 1 for each in settings):
        yield "num_distributed_optimizer_instances has to be 1"
    yield from _gradient_problems(chunks)


def _gradient_problems(chunks: Sequence[Any]) -> Iterator[str]:
    named = [pair for chunk in chunks for pair in chunk.named_parameters() if pair[1].requires_grad]
    expert = next((name for name, p in named if not getattr(p, "allreduce", True)), None)
    if expert is not None:
        yield f"{expert} is an expert's, and gradients of experts are not measured"
    dtype = next((p.main_grad.dtype for _, p in named if p.main_grad.dtype != torch.float32), None)
    if dtype is not None:
        yield (
            f"gradients are accumulated in {dtype}; set grad_reduce_in_fp32 "
            "(--accumulate-allreduce-grads-in-fp32)"
        )


def carry_state(
    optimizer: Any, key: str, save: Callable[[], str], load: Callable[[str], None]
) -> None:
    """Let a text travel in the optimizer's state, in every format of checkpoints.

    Args:
        optimizer: megatron-core optimizer.
        key: of the text in the state.
        save: gives the text, equal on all ranks.
        load: takes it; not called for a state without one.
    """
    first = single_optimizers(optimizer)[0]
    state_dict, sharded, load_state = (
        first.state_dict,
        first.sharded_state_dict,
        first.load_state_dict,
    )
    is_sharding = False

    @functools.wraps(state_dict)
    def with_text(*args: Any, **kwargs: Any) -> Any:
        state = state_dict(*args, **kwargs)
        # the distributed optimizer shards all that it finds here, and then misses it in checkpoints without it
        return state if is_sharding else {**state, key: save()}

    @functools.wraps(sharded)
    def sharded_with_text(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_sharding
        is_sharding = True
        try:
            return {**sharded(*args, **kwargs), key: save()}
        finally:
            is_sharding = False

    @functools.wraps(load_state)
    def load_with_text(state: Any) -> None:
        state = dict(state)
        text = state.pop(key, None)
        load_state(state)
        if text is not None:
            load(text)

    first.state_dict = with_text
    first.sharded_state_dict = sharded_with_text
    first.load_state_dict = load_with_text


def clip_gradients(optimizer: Any, *, max_norm: float, total_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`, given the norm of the whole model."""
    for single in single_optimizers(optimizer):
        if getattr(single, "is_stub_optimizer", False):
            continue
        parameters = single.get_parameters()
        if parameters:
            clip_grads.clip_grad_by_total_norm_fp32(
                parameters,
                max_norm,
                total_norm,
                single.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
