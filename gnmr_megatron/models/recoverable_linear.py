"""Megatron's column- and row-parallel linears, with a precision path that can change between steps."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from gnmr_megatron.models.input_exchange import AllReduceExchange, SequenceExchange
from gnmr_megatron.precision.exchange import InputExchange
from gnmr_megatron.precision.linear import AccumulatesGradient, linear
from gnmr_megatron.precision.paths import ExactPath, PrecisionPath
from gnmr_megatron.precision.quantizer import Quantizer


class _Recoverable:
    """What both linears share; the switchboard sets the attributes.

    Attributes:
        unit_id: global name of the unit.
        path: precision path of the current step.
        quantizer: its rounding noise and counts.
    """

    unit_id: str = ""
    path: PrecisionPath = ExactPath("exact")
    quantizer: Quantizer | None = None

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        gradient_accumulation_fusion: bool = False,
        **_: Any,
    ) -> Tensor:
        exchange: InputExchange | None = None
        if sequence_parallel:
            exchange = SequenceExchange(tp_group)
        elif allreduce_dgrad:
            exchange = AllReduceExchange(tp_group)
        output = linear(
            input,
            weight,
            self.path,
            exchange=exchange,
            quantizer=self.quantizer,
            accumulate=_fused_accumulation() if gradient_accumulation_fusion else None,
        )
        return output if bias is None else output + bias

    def __repr__(self) -> str:
        # the engine's column-parallel linear has a __repr__ of its own, so extra_repr would not show
        return f"{type(self).__name__}(unit={self.unit_id}, path={self.path.name})"


def _fused_accumulation() -> AccumulatesGradient:
    import fused_weight_gradient_mlp_cuda  # apex's; the engine asks for fusion only where it is installed

    kernel: AccumulatesGradient = fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    return kernel


class RecoverableColumnLinear(_Recoverable, ColumnParallelLinear):
    """Column-parallel linear on a precision path."""


class RecoverableRowLinear(_Recoverable, RowParallelLinear):
    """Row-parallel linear on a precision path."""


RecoverableLinear = RecoverableColumnLinear | RecoverableRowLinear
