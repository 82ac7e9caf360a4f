"""A path of frozen weights: they are kept packed and multiplied as what they unpack to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnmr_megatron.precision.exchange import InputExchange
from gnmr_megatron.precision.formats import INT8
from gnmr_megatron.precision.paths import ExactPath, Kept
from gnmr_megatron.precision.quantization import PackedTensor, Quantization, unpack
from gnmr_megatron.precision.quantizer import Quantizer

PER_OUTPUT_CHANNEL = Quantization(INT8, rows=1, scale="fp32")
"""INT8 with an FP32 scale for each row of a weight."""


@dataclass(frozen=True)
class FrozenPath(ExactPath):
    """GEMMs in the type of the activations, on a weight that was rounded once.

    Attributes:
        packed: the weight of the one linear that this path is for.
    """

    packed: PackedTensor = field(kw_only=True)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        exchange: InputExchange,
        quantizer: Quantizer,
        *,
        keep: bool,
    ) -> tuple[Tensor, Kept]:
        """See `PrecisionPath`."""
        return super().forward(x, self._weight(x.dtype), exchange, quantizer, keep=keep)

    def grad_input(self, grad_output: Tensor, weight: Tensor, quantizer: Quantizer) -> Tensor:
        """See `PrecisionPath`."""
        return super().grad_input(grad_output, self._weight(grad_output.dtype), quantizer)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        return unpack(self.packed, dtype)
