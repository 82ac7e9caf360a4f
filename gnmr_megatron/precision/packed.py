"""Tensors kept as integer codes and scales: one INT8 a byte, or two INT4 a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gnmr_megatron.precision.formats import NumberFormat

SCALE_DTYPE = (
    torch.bfloat16
)  # 2 bytes, and the exponent range of FP32, so that no group over- or underflows


@dataclass(frozen=True)
class Quantization:
    """How a tensor is turned into codes.

    Attributes:
        format: integer format of the codes.
        granularity: what shares a scale: the tensor, a token (row), or a group of neighbours in a token.
        group_size: values per scale for `group`.
        rounding: to nearest, ties to even; or stochastic, with expectation equal to the value.
    """

    format: NumberFormat
    granularity: Literal["tensor", "token", "group"]
    group_size: int
    rounding: Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class PackedTensor:
    """Codes and scales of a [..., width] tensor, seen as [tokens, width].

    Attributes:
        codes: int8 [tokens, width] for INT8; [tokens, width / 2] for INT4, where a byte holds column c in
            its low and column c + width / 2 in its high half.
        scales: bfloat16 [blocks, groups]: scale of each group of columns in each of `blocks` runs of rows.
        format: format of the codes.
        width: size of the last axis.
    """

    codes: Tensor
    scales: Tensor
    format: NumberFormat
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        return self.codes.nbytes + self.scales.nbytes


def quantize(
    x: Tensor, how: Quantization, generator: torch.Generator | None = None
) -> PackedTensor:
    """Round a tensor to codes: value = code * scale, with scale = amax / format.max.

    A group that holds NaN or inf gets a scale that is not finite, so the damage shows after `dequantize`.

    Args:
        x: [..., width] floating point.
        how: format, granularity and rounding.
        generator: source of the noise for stochastic rounding, on the device of `x`.

    Raises:
        ValueError: the width cannot be divided into groups, or is odd for INT4.
    """
    width = x.shape[-1]
    rows = x.detach().reshape(-1, width).float()
    groups = _num_groups(width, how)
    grouped = rows.view(len(rows), groups, width // groups)
    amax = grouped.abs().amax(dim=-1)
    if how.granularity == "tensor":
        amax = amax.amax(dim=0, keepdim=True)
    scales = (amax / how.format.max).to(SCALE_DTYPE)
    scaled = grouped / scales.float()[:, :, None]
    if how.rounding == "stochastic":
        noise = torch.rand(scaled.shape, generator=generator, device=x.device)
        scaled = scaled.add_(noise).floor_()
    else:
        scaled = scaled.round_()
    codes = scaled.clamp_(-how.format.max, how.format.max).to(torch.int8).view(len(rows), width)
    return PackedTensor(_pack(codes, how.format), scales, how.format, width)


def dequantize(packed: PackedTensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Values of a packed tensor, rounded to `dtype`, in `shape`."""
    codes = _unpack(packed)
    blocks, groups = packed.scales.shape
    grouped = codes.view(blocks, len(codes) // blocks, groups, packed.width // groups).float()
    return (grouped * packed.scales.float()[:, None, :, None]).to(dtype).view(shape)


def _num_groups(width: int, how: Quantization) -> int:
    if how.format.bits == 4 and width % 2:
        raise ValueError(f"INT4 packs two values a byte: the width {width} must be even")
    if how.granularity != "group":
        return 1
    if width % how.group_size:
        raise ValueError(f"the width {width} is no multiple of the group size {how.group_size}")
    return width // how.group_size


def _pack(codes: Tensor, number_format: NumberFormat) -> Tensor:
    if number_format.bits == 8:
        return codes
    low, high = codes.chunk(2, dim=1)
    return (low & 15) | (high << 4)


def _unpack(packed: PackedTensor) -> Tensor:
    if packed.format.bits == 8:
        return packed.codes
    # int8 shifts are arithmetic, so they restore the sign
    return torch.cat([(packed.codes << 4) >> 4, packed.codes >> 4], dim=1)
