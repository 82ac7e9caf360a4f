"""Real FP8 GEMMs through torch's scaled matmul, on CPUs and on GPUs that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from gnmr_megatron.precision.exchange import InputExchange
from gnmr_megatron.precision.formats import E4M3
from gnmr_megatron.precision.paths import Kept
from gnmr_megatron.precision.quantization import PackedTensor, Quantization
from gnmr_megatron.precision.quantizer import Quantizer


@dataclass(frozen=True)
class ScaledMatmulPath:
    """All three GEMMs on E4M3 operands with FP32 scales.

    Both gradients are summed in FP32; the forward takes the faster accumulation where a GPU has it, as is usual.
    On CUDA, row-wise results are BF16.

    Attributes:
        name: as in the configuration.
        is_rowwise: a scale for each row of the left and each column of the right operand; else one a tensor.
    """

    name: str
    is_rowwise: bool

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
        # values travel, not codes: a scale has to cover the rows of all ranks
        whole = exchange.gather(x)()
        packed = quantizer.pack(whole, self._by_row)
        output = self._matmul(packed, quantizer.pack(weight, self._by_row), x.dtype, is_fast=True)
        kept = Kept(())
        if keep:
            saved = quantizer.pack(whole, self._by_column) if self.is_rowwise else packed
            kept = Kept((exchange.own_rows(saved.codes),), (saved.scales,))
        return output, kept

    def restore(
        self, rows: Sequence[Tensor], shared: Sequence[Tensor], weight: Tensor
    ) -> PackedTensor:
        """See `PrecisionPath`."""
        return PackedTensor(rows[0], shared[0], self._by_column, weight.shape[1])

    def grad_input(self, grad_output: Tensor, weight: Tensor, quantizer: Quantizer) -> Tensor:
        """See `PrecisionPath`."""
        gradient = quantizer.pack(grad_output, self._by_row)
        columns = _transposed(quantizer.pack(weight, self._by_column))
        return self._matmul(gradient, columns, grad_output.dtype)

    def grad_weight(
        self, grad_output: Tensor, operand: PackedTensor, quantizer: Quantizer
    ) -> Tensor:
        """See `PrecisionPath`."""
        gradient = _transposed(quantizer.pack(grad_output, self._by_column))
        return self._matmul(gradient, _transposed(operand), grad_output.dtype)

    @property
    def _by_row(self) -> Quantization:
        return Quantization(E4M3, rows=1 if self.is_rowwise else None, scale="fp32")

    @property
    def _by_column(self) -> Quantization:
        return self._by_row.transposed

    def _matmul(
        self, left: PackedTensor, right: PackedTensor, dtype: torch.dtype, *, is_fast: bool = False
    ) -> Tensor:
        """Left [m, k] times the transpose of right [n, k]; scales lie along their rows."""
        kind = ScalingType.RowWise if self.is_rowwise else ScalingType.TensorWise
        if self.is_rowwise and left.codes.is_cuda:
            dtype = torch.bfloat16  # the only output of the row-wise CUDA kernel
        result: Tensor = F.scaled_mm(
            left.codes.view(torch.float8_e4m3fn),
            right.codes.view(torch.float8_e4m3fn).t(),
            left.scales if self.is_rowwise else left.scales.reshape(()),
            kind,
            right.scales.reshape(1, -1) if self.is_rowwise else right.scales.reshape(()),
            kind,
            output_dtype=dtype,
            use_fast_accum=is_fast,
        )
        return result


def _transposed(packed: PackedTensor) -> PackedTensor:
    """The transpose in row-major memory, which the kernels ask for."""
    return PackedTensor(
        packed.codes.t().contiguous(),
        packed.scales.reshape(
            -1, 1
        ),  # one a column became one a row; the kernels check strides, too
        packed.how.transposed,
        len(packed.codes),
    )
