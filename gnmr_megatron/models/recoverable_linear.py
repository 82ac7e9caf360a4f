"""Megatron's column- and row-parallel linears, with a precision path that can change between steps."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from gnmr_megatron.models.input_exchange import AllReduceExchange, SequenceExchange
from gnmr_megatron.models.lora_adapter import LoraAdapter
from gnmr_megatron.precision.exchange import InputExchange
from gnmr_megatron.precision.linear import AccumulatesGradient, linear
from gnmr_megatron.precision.paths import ExactPath, PrecisionPath
from gnmr_megatron.precision.quantizer import Quantizer

_EXACT = ExactPath("exact")


class _Recoverable:
    """What both linears share; the switchboard sets the attributes.

    Attributes:
        unit_id: global name of the unit.
        path: precision path of the current step.
        quantizer: its rounding noise and counts.
        lora: adapter beside the weight, which is then frozen.
        is_merged: whether the weight holds the adapter for now; it is then multiplied exactly, whatever the path.
    """

    unit_id: str = ""
    path: PrecisionPath = _EXACT
    quantizer: Quantizer | None = None
    lora: LoraAdapter | None
    is_merged: bool = False
    weight: Any
    tp_group: Any
    _sharded_axes: ClassVar[dict[str, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The engine's, and what the adapter adds."""
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]  # the engine's linear
        if self.lora is not None and not self.is_merged:
            output = output + self.lora(input_, self.path, self.quantizer)
        return output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The engine's, with the adapter's matrices along the axes on which ranks split them."""
        content: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),  # type: ignore[attr-defined]  # the engine's linear
            prefix,
            self._sharded_axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        rows = f"{prefix}lora.b"
        if prefix.endswith("linear_fc1.") and rows in content:
            # [gate; up], each half sharded by itself, as the engine does with the weight
            content[rows] = apply_swiglu_sharded_factory(content[rows], sharded_offsets)
        return content

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
            _EXACT if self.is_merged else self.path,
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

    _sharded_axes: ClassVar[dict[str, int]] = {"weight": 0, "lora.b": 0}


class RecoverableRowLinear(_Recoverable, RowParallelLinear):
    """Row-parallel linear on a precision path."""

    _sharded_axes: ClassVar[dict[str, int]] = {"weight": 1, "lora.a": 1}


RecoverableLinear = RecoverableColumnLinear | RecoverableRowLinear
