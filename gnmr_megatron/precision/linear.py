"""The one autograd function of a recoverable linear: y = x W^T on a precision path."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gnmr_megatron.precision.exchange import InputExchange, NoExchange
from gnmr_megatron.precision.paths import ExactPath, PrecisionPath
from gnmr_megatron.precision.quantizer import Quantizer


class AccumulatesGradient(Protocol):
    """A kernel that adds a weight gradient to an FP32 buffer within its GEMM, without rounding it before."""

    def __call__(self, operand: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """main_grad += grad_output^T operand, for 16-bit [tokens, out] and [tokens, in]."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        path: PrecisionPath,
        exchange: InputExchange,
        quantizer: Quantizer,
        is_recorded: bool,  # noqa: FBT001  # autograd functions take arguments by position
        accumulate: AccumulatesGradient | None,
    ) -> Tensor:
        output, kept = path.forward(
            _flat(x), weight, exchange, quantizer, keep=is_recorded and ctx.needs_input_grad[1]
        )
        ctx.path, ctx.exchange, ctx.quantizer = path, exchange, quantizer
        ctx.accumulate = accumulate
        ctx.num_rows, ctx.input_dtype, ctx.input_shape = len(kept.rows), x.dtype, x.shape
        ctx.save_for_backward(weight, *kept.rows, *kept.shared)
        return output.to(x.dtype).view(-1, *x.shape[1:-1], len(weight))

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        path, exchange, quantizer = ctx.path, ctx.exchange, ctx.quantizer
        weight, *kept = ctx.saved_tensors
        rows, shared = kept[: ctx.num_rows], kept[ctx.num_rows :]
        grad_output = _flat(grad_output)
        grad_input = grad_weight = wait_for_grad = None
        quantizer.start_pass("backward")
        # what travels is what was kept: for INT4, a quarter of the bytes of BF16
        waits_for_rows = [exchange.gather(part) for part in rows] if ctx.needs_input_grad[1] else []
        if ctx.needs_input_grad[0]:
            partial = path.grad_input(grad_output, weight, quantizer).to(ctx.input_dtype)
            wait_for_grad = exchange.reduce(partial)
        if ctx.needs_input_grad[1]:
            operand = path.restore([wait() for wait in waits_for_rows], shared, weight)
            if _can_accumulate(ctx.accumulate, path, operand, grad_output, weight):
                ctx.accumulate(operand.contiguous(), grad_output.contiguous(), weight.main_grad)
                weight.grad_added_to_main_grad = True
                grad_weight = torch.empty_like(weight)  # only so that the hooks of DDP run
            else:
                grad_weight = path.grad_weight(grad_output, operand, quantizer).to(weight.dtype)
        if wait_for_grad is not None:
            grad_input = wait_for_grad().view(ctx.input_shape)
        return grad_input, grad_weight, None, None, None, None, None


def _can_accumulate(
    accumulate: AccumulatesGradient | None,
    path: PrecisionPath,
    operand: Any,
    grad_output: Tensor,
    weight: Tensor,
) -> bool:
    """Whether the weight gradient is a plain GEMM of 16-bit operands into an FP32 buffer."""
    return (
        accumulate is not None
        and isinstance(path, ExactPath)
        and operand.dtype == grad_output.dtype
        and operand.dtype in (torch.bfloat16, torch.float16)
        and getattr(weight, "main_grad", grad_output).dtype == torch.float32
    )


def linear(
    x: Tensor,
    weight: Tensor,
    path: PrecisionPath,
    *,
    exchange: InputExchange | None = None,
    quantizer: Quantizer | None = None,
    accumulate: AccumulatesGradient | None = None,
) -> Tensor:
    """Multiply by a weight on a precision path: y = x W^T.

    Args:
        x: [sequence, ..., in] floating point; this rank's part of the sequence where `exchange` gathers it.
        weight: [out, in] floating point.
        path: what to compute in and what to keep.
        exchange: traffic between ranks; none by default.
        quantizer: noise and counters of the linear; those of this call alone by default.
        accumulate: adds the weight gradient to `weight.main_grad` where GEMMs are exact, and marks that in
            `weight.grad_added_to_main_grad`, as Megatron's DDP expects.

    Returns:
        [sequence, ..., out] in the type of `x`.
    """
    quantizer = quantizer or Quantizer()
    is_recorded = torch.is_grad_enabled()
    quantizer.start_pass("forward" if is_recorded else "forward without gradients")
    result: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        x, weight, path, exchange or NoExchange(), quantizer, is_recorded, accumulate
    )
    return result


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
