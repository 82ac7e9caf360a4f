"""Precision paths: how one linear computes and what it keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gnmr_megatron.precision.exchange import InputExchange
from gnmr_megatron.precision.quantization import PackedTensor, Quantization, unpack
from gnmr_megatron.precision.quantizer import Quantizer


@dataclass(frozen=True)
class Kept:
    """What a forward keeps of its input for the weight gradient.

    Attributes:
        rows: tensors whose first axis runs over this rank's tokens (or over a scale for them): gathered in the
            backward where ranks hold parts of the sequence.
        shared: tensors that every rank holds whole.
    """

    rows: tuple[Tensor, ...]
    shared: tuple[Tensor, ...] = ()


class PrecisionPath(Protocol):
    """One way to run y = x W^T.

    Matrices: x [tokens, in], W [out, in], y and its gradient [tokens, out]. Results may be of any floating type;
    the caller casts them.
    """

    @property
    def name(self) -> str:
        """As in the configuration."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        exchange: InputExchange,
        quantizer: Quantizer,
        *,
        keep: bool,
    ) -> tuple[Tensor, Kept]:
        """Output for the rows of all ranks, and what to keep of this rank's rows (nothing without `keep`)."""

    def restore(self, rows: Sequence[Tensor], shared: Sequence[Tensor], weight: Tensor) -> Any:
        """The operand of the weight gradient, from what forward kept, rows gathered."""

    def grad_input(self, grad_output: Tensor, weight: Tensor, quantizer: Quantizer) -> Tensor:
        """Gradient [tokens, in] of the rows of all ranks."""

    def grad_weight(self, grad_output: Tensor, operand: Any, quantizer: Quantizer) -> Tensor:
        """Gradient [out, in]."""


@dataclass(frozen=True)
class ExactPath:
    """All three GEMMs in one floating type; the input is kept as it is.

    Attributes:
        name: as in the configuration.
        dtype: type of the operands; None takes that of the input.
    """

    name: str
    dtype: torch.dtype | None = None

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
        operand = x.to(self.dtype or x.dtype)
        output = exchange.gather(operand)() @ weight.to(operand.dtype).t()
        return output, self._keep(operand, quantizer) if keep else Kept(())

    def restore(self, rows: Sequence[Tensor], shared: Sequence[Tensor], weight: Tensor) -> Tensor:
        """See `PrecisionPath`."""
        return rows[0]

    def grad_input(self, grad_output: Tensor, weight: Tensor, quantizer: Quantizer) -> Tensor:
        """See `PrecisionPath`."""
        dtype = self.dtype or grad_output.dtype
        return grad_output.to(dtype) @ weight.to(dtype)

    def grad_weight(self, grad_output: Tensor, operand: Tensor, quantizer: Quantizer) -> Tensor:
        """See `PrecisionPath`."""
        dtype = self.dtype or grad_output.dtype
        return grad_output.to(dtype).t() @ operand.to(dtype)

    def _keep(self, operand: Tensor, quantizer: Quantizer) -> Kept:
        return Kept((operand,))


@dataclass(frozen=True)
class SavedPath(ExactPath):
    """Exact GEMMs, but the weight gradient sees what was kept of the input: codes and scales.

    Attributes:
        saved: how the input is packed.
    """

    saved: Quantization = field(kw_only=True)

    def restore(self, rows: Sequence[Tensor], shared: Sequence[Tensor], weight: Tensor) -> Tensor:
        """See `PrecisionPath`."""
        codes, scales = rows
        return unpack(PackedTensor(codes, scales, self.saved, weight.shape[1]), weight.dtype)

    def _keep(self, operand: Tensor, quantizer: Quantizer) -> Kept:
        packed = quantizer.pack(operand, self.saved)
        return Kept((packed.codes, packed.scales))
