"""Emulated low-precision GEMMs: operands rounded to a format, multiplied and summed in FP32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gnmr_megatron.precision.exchange import InputExchange
from gnmr_megatron.precision.paths import Kept
from gnmr_megatron.precision.quantization import PackedTensor, Quantization, unpack
from gnmr_megatron.precision.quantizer import Quantizer


@dataclass(frozen=True)
class EmulatedPath:
    """Forward, input-gradient and weight-gradient GEMM on rounded operands.

    Scales run along the axis that a GEMM contracts, so each operand is rounded as that GEMM needs it. What is
    kept of the input are real codes: those of the forward, rounded again along the tokens in the backward as in
    DeepSeek-V3 (arXiv 2412.19437, section 3.3); or, where a token has one scale, which a sum over tokens cannot
    use, codes of the input with one scale a channel.

    Attributes:
        name: as in the configuration.
        activation: rounding of inputs [tokens, in] for the GEMM over their columns.
        weight: rounding of [out, in] for the GEMM over `in`.
        gradient: rounding of output gradients [tokens, out] for the GEMM over their columns.
    """

    name: str
    activation: Quantization
    weight: Quantization
    gradient: Quantization

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
        packed = quantizer.pack(x, self.activation)
        waits = [exchange.gather(part) for part in (packed.codes, packed.scales)]
        rounded_weight = quantizer.round(weight, self.weight)
        codes, scales = (wait() for wait in waits)
        whole = unpack(PackedTensor(codes, scales, self.activation, packed.width))
        kept = Kept(())
        if keep:
            saved = packed if self._kept == self.activation else quantizer.pack(x, self._kept)
            kept = Kept((saved.codes, saved.scales))
        return whole @ rounded_weight.t(), kept

    def restore(self, rows: Sequence[Tensor], shared: Sequence[Tensor], weight: Tensor) -> Tensor:
        """See `PrecisionPath`."""
        codes, scales = rows
        return unpack(PackedTensor(codes, scales, self._kept, weight.shape[1]))

    def grad_input(self, grad_output: Tensor, weight: Tensor, quantizer: Quantizer) -> Tensor:
        """See `PrecisionPath`."""
        gradient = quantizer.round(grad_output, self.gradient)
        return gradient @ quantizer.round(weight, self.weight.transposed)

    def grad_weight(self, grad_output: Tensor, operand: Tensor, quantizer: Quantizer) -> Tensor:
        """See `PrecisionPath`."""
        along_tokens = self.activation.transposed
        if self._kept != along_tokens:
            operand = quantizer.round(operand, along_tokens)
        return quantizer.round(grad_output, self.gradient.transposed).t() @ operand

    @property
    def _kept(self) -> Quantization:
        return self.activation if self.activation.columns else self.activation.transposed
