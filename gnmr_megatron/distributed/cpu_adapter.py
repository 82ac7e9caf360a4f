"""Let megatron-core 0.16.1 run on CPU tensors over gloo.

Each patch replaces something that can only raise on a machine without CUDA, or is seen by megatron-core
alone, so torch behaves as before. Line numbers are those of the call sites in megatron-core 0.16.1. A
TorchFunctionMode would not do: torch drops it while `Tensor.backward` runs, and it is local to a thread.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")

# Called with a literal device="cuda" at:
#   zeros   pipeline_parallel/schedules.py 596, 983, 2138; optimizer/clip_grads.py 103, 115, 174, 207;
#           distributed/param_and_grad_buffer.py 768
#   tensor  optimizer/optimizer.py 473, 481, 485, 907; optimizer/clip_grads.py 90;
#           optimizer/grad_scaler.py 15, 88; rerun_state_machine.py 261, 265; tensor_parallel/data.py 37; utils.py 1207;
#           dist_checkpointing/strategies/state_dict_saver.py 204; models/common/embeddings/rope_utils.py 62
#   ones    transformer/utils.py 35, 40
#   empty, empty_like  dist_checkpointing/exchange_utils.py 98-110, 326
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")

_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}

_state = {"enabled": False}


def enable_cpu() -> bool:
    """Install the patches; idempotent, and without effect where CUDA exists.

    Returns:
        Whether this process runs on the CPU.
    """
    if torch.cuda.is_available():
        return False
    if not _state["enabled"]:
        _state["enabled"] = True
        _patch_factories()
        _patch_moves()
        _patch_type_names()
        _patch_streams()
        _patch_random()
        _patch_torch_adam()
    return True


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get(
            "pin_memory"
        ):  # rope_utils.py 62, utils.py 2117: pinning needs an accelerator
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapper


def _patch_factories() -> None:
    # `with torch.device(...)` remembers all factories when it first looks; asked it is about the originals
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _patch_moves() -> None:
    # tensor.cuda() and module.cuda(): rope_utils.py 64; tensor_parallel/data.py 84; utils.py 898;
    # grad_scaler.py 140; distrib_optimizer.py 1089; exchange_utils.py 336, 499; language_module.py 244
    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign]
    torch.nn.Module.cuda = stay  # type: ignore[method-assign]


def _patch_type_names() -> None:
    # param.type() is compared with "torch.cuda.FloatTensor": clip_grads.py 167; optimizer.py 671, 690;
    # distrib_optimizer.py 361, 420, 582. Only megatron.core itself is told so.
    real = torch.Tensor.type

    @functools.wraps(real)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.dtype in _TYPE_NAMES:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron.core"):
                return _TYPE_NAMES[self.dtype]
        return real(self, *args, **kwargs)

    torch.Tensor.type = tensor_type  # type: ignore[assignment, method-assign]


class _NoStream:
    """Stream and event of a device where everything happens in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _NoStream()

    def query(self) -> bool:
        return True


def _patch_streams() -> None:
    # current_device as device=...: tensor_parallel/mappings.py 91, 141, 148, 181, 442;
    #   tensor_parallel/layers.py 261, 552, 597, 607, 873, 899, 1197, 1218; p2p_communication.py 190-202, 313,
    #   321; param_and_grad_buffer.py 783, 800, 806; rotary_pos_embedding.py 78, 162;
    #   distributed_data_parallel.py 230; distrib_optimizer.py 791, 1077; optimizer.py 1141; module.py 249;
    #   async_utils.py 165, 604; state_dict_saver.py 252
    # synchronize: p2p_communication.py 242, 398; fully_parallel.py 272, 281; filesystem_async.py 230;
    #   async_utils.py 212; parallel_state.py 198
    # set_device: async_utils.py 488. Streams: param_and_grad_buffer.py 417, 422, 529;
    #   distributed_data_parallel.py 230 (several distributed optimizers)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    cuda.set_device = lambda *_, **__: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _NoStream()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()


def _patch_random() -> None:
    # The "cuda" generator is torch's CPU generator, so the tracker forks what CPU dropout draws from:
    # tensor_parallel/random.py 55, 235-240, 250-277, 422, 447-460; rerun_state_machine.py 957, 970.
    # Own functions: torch's own under two names would break torch._dynamo's table of functions.
    def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    namespaces: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for namespace in namespaces:
        namespace.get_rng_state = get_rng_state
        namespace.set_rng_state = set_rng_state
        namespace.manual_seed = manual_seed
        namespace.initial_seed = lambda: torch.default_generator.initial_seed()
    from megatron.core.tensor_parallel import random as engine_random

    # _set_cuda_rng_state queues its work until CUDA starts, which never happens: random.py 240, 255, 277, 457
    engine_random._get_cuda_rng_state = get_rng_state
    engine_random._set_cuda_rng_state = set_rng_state


def _patch_torch_adam() -> None:
    """Make checkpoints of the DistributedOptimizer load where torch's AdamW is the optimizer.

    Without Transformer Engine and apex, megatron-core 0.16.1 (a) asserts a common `step` before torch has
    made one (distrib_optimizer.py 640), (b) looks for `step` among the loaded tensors (940), and (c) gives all
    parameters one `step` tensor (830), so that AdamW counts a step once per parameter, silently.
    """
    from megatron.core.optimizer import distrib_optimizer as engine

    optimizer = engine.DistributedOptimizer
    if engine.HAVE_APEX_OR_TE:
        return
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict
    set_states = optimizer._set_main_param_and_optimizer_states

    @functools.wraps(state_dict)
    def state_dict_with_step(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def load_with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for parameter_state in self.optimizer.state.values():
            parameter_state["step"] = parameter_state["step"].clone()

    @functools.wraps(set_states)
    def set_states_with_step(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        set_states(self, model_param, {**tensors, "step": self.optimizer.state[main_param]["step"]})

    optimizer.state_dict = state_dict_with_step
    optimizer.load_state_dict = load_with_own_steps
    optimizer._set_main_param_and_optimizer_states = set_states_with_step
