"""Compiling elementwise chains into one kernel, where the machine has what that takes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

_MOST_KERNELS = 64
_settings = {"is_enabled": False}


def use_fused_kernels(*, enabled: bool, device: torch.device) -> bool:
    """Turn fusion on or off for this process; returns whether it is on.

    It stays off where there is no compiler: C++ for CPUs, Triton for GPUs.
    """
    _settings["is_enabled"] = enabled and has_compiler(device)
    if _settings["is_enabled"]:  # the compiler takes seconds to import
        import torch._inductor.config

        # Triton's own division is approximate, and eager's is not
        torch._inductor.config.eager_numerics.division_rounding = True
        # a kernel for each format, block and layout that is used
        limit = max(torch._dynamo.config.recompile_limit, _MOST_KERNELS)
        torch._dynamo.config.recompile_limit = limit
    return _settings["is_enabled"]


def fused_kernels_are_used() -> bool:
    """Whether fusion is on in this process."""
    return _settings["is_enabled"]


def fused(function: F) -> F:
    """Run a function of matrices with one kernel for any number of rows, or as it is: the same bits either way.

    Args:
        function: takes matrices first, then arguments that are compiled in.
    """

    @functools.cache  # torch.compile imports the compiler, which most processes never use
    def compiled() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def run(matrices: Sequence[Tensor | None], *constants: Any) -> Any:
        rows = [len(matrix) for matrix in matrices if matrix is not None]
        # one row would be compiled in as a constant
        if not _settings["is_enabled"] or min(rows) < 2:
            return function(matrices, *constants)
        # none of them may differ in what a kernel does not depend on
        plain = [None if matrix is None else matrix.detach() for matrix in matrices]
        for matrix in plain:
            if matrix is not None:
                torch._dynamo.mark_dynamic(matrix, 0)
        return compiled()(plain, *constants)

    return cast(F, run)


def has_compiler(device: torch.device) -> bool:
    """Whether there is what compiles fused kernels: C++ for CPUs, Triton for GPUs."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False
