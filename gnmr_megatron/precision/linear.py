"""The one autograd function of a recoverable linear: y = x W^T, with a path that says what backward keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gnmr_megatron.precision.packed import PackedTensor, dequantize, quantize
from gnmr_megatron.precision.paths import PrecisionPath


class InputExchange(Protocol):
    """What a linear's input and its gradient go through between ranks.

    Both calls start the exchange and return a function that waits for the result, so that the backward can
    overlap them with a GEMM.
    """

    def gather(self, shard: Tensor) -> Callable[[], Tensor]:
        """The whole input of the GEMM, from this rank's rows."""

    def reduce(self, grad_input: Tensor) -> Callable[[], Tensor]:
        """The gradient of this rank's rows, from a partial gradient of the whole input."""


class NoExchange:
    """One rank holds the whole input."""

    def gather(self, shard: Tensor) -> Callable[[], Tensor]:
        """The input itself."""
        return lambda: shard

    def reduce(self, grad_input: Tensor) -> Callable[[], Tensor]:
        """The gradient itself."""
        return lambda: grad_input


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        path: PrecisionPath,
        exchange: InputExchange,
        generator: torch.Generator | None,
    ) -> Tensor:
        dtype = path.compute_dtype or x.dtype
        operand = x.to(dtype)
        ctx.path, ctx.exchange, ctx.dtype, ctx.packed = path, exchange, dtype, None
        ctx.input_dtype, ctx.input_shape = x.dtype, x.shape
        if not ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight)
        elif path.saved_input is None:
            ctx.save_for_backward(weight, operand)
        else:
            packed = quantize(operand, path.saved_input, generator)
            ctx.packed = (packed.format, packed.width)
            ctx.save_for_backward(weight, packed.codes, packed.scales)
        whole = exchange.gather(operand)()
        return torch.matmul(whole, weight.to(dtype).t()).to(x.dtype)

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        weight, *kept = ctx.saved_tensors
        grad_output = grad_output.to(ctx.dtype)
        wait_for_input = _gather_kept(ctx, kept) if ctx.needs_input_grad[1] else None
        grad_input = grad_weight = wait_for_grad = None
        if ctx.needs_input_grad[0]:
            partial = torch.matmul(grad_output, weight.to(ctx.dtype)).to(ctx.input_dtype)
            wait_for_grad = ctx.exchange.reduce(partial)
        if wait_for_input is not None:
            flat = grad_output.reshape(-1, grad_output.shape[-1])
            grad_weight = torch.matmul(flat.t(), wait_for_input()).to(weight.dtype)
        if wait_for_grad is not None:
            grad_input = wait_for_grad()
        return grad_input, grad_weight, None, None, None


def _gather_kept(ctx: Any, kept: list[Tensor]) -> Callable[[], Tensor]:
    """Start gathering what forward kept; the result is the [tokens, width] operand of the weight gradient."""
    if ctx.packed is None:
        wait_for_operand = ctx.exchange.gather(kept[0])
        return lambda: _flat(wait_for_operand())
    # codes and scales travel, not values: a quarter of the bytes of BF16 for INT4
    wait_for_codes, wait_for_scales = (ctx.exchange.gather(part) for part in kept)

    def operand() -> Tensor:
        codes = wait_for_codes()
        packed = PackedTensor(codes, wait_for_scales(), *ctx.packed)
        return dequantize(packed, torch.Size([len(codes), packed.width]), ctx.dtype)

    return operand


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def linear(
    x: Tensor,
    weight: Tensor,
    path: PrecisionPath,
    *,
    exchange: InputExchange | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Multiply by a weight on a precision path: y = x W^T.

    Forward and input gradient use the exact operands (in the path's compute type); the weight gradient uses
    what the path kept of the input.

    Args:
        x: [sequence, batch, in] floating point; this rank's rows where `exchange` gathers them.
        weight: [out, in] floating point.
        path: what to compute in and what to keep.
        exchange: traffic between ranks; none by default.
        generator: noise for stochastic rounding, on the device of `x`.

    Returns:
        [sequence, batch, out] in the type of `x`.
    """
    result: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        x, weight, path, exchange or NoExchange(), generator
    )
    return result
