"""Blocks of a matrix that share a scale: rounding them to a format, and keeping them as codes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gnmr_megatron.precision.catalog import ScaleType
from gnmr_megatron.precision.formats import FloatFormat, NumberFormat, decode, encode, round_to

Rounding = Literal["nearest", "stochastic"]
SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Quantization:
    """How a [rows, columns] matrix is turned into codes and scales: value = code * scale.

    Attributes:
        format: format of the codes.
        rows: rows of a block that shares a scale; None for all.
        columns: columns of such a block; None for all. Blocks at the edge may be smaller.
        scale: type of the scales. `fp32` and `bf16` are amax / format.max; `e8m0` is the power of two of the
            Microscaling specification, 2^(floor(log2 amax) - floor(log2 format.max)).
        rounding: to nearest, ties to even; or stochastic, with expectation equal to the value.
    """

    format: NumberFormat
    rows: int | None = 1
    columns: int | None = None
    scale: ScaleType = "bf16"
    rounding: Rounding = "nearest"

    @property
    def transposed(self) -> Quantization:
        """The same along the other axis: for a GEMM that contracts rows instead of columns."""
        return replace(self, rows=self.columns, columns=self.rows)


@dataclass(frozen=True)
class PackedTensor:
    """Codes and scales of a [rows, width] matrix.

    Attributes:
        codes: int8 [rows, bytes]. 8 bits: a code a byte. 4 bits: column c in the low and c + width / 2 in the
            high half of a byte. 6 bits: columns of the first three quarters in the low six bits of a byte, those
            of the last quarter spread over the two high bits of the three.
        scales: [row blocks, column blocks], of a type of `SCALE_DTYPES`; as int8 where torch cannot copy it.
        how: format and blocks.
        width: columns of the matrix.
    """

    codes: Tensor
    scales: Tensor
    how: Quantization
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        return self.codes.nbytes + self.scales.nbytes


def pack(x: Tensor, how: Quantization, noise: Tensor | None = None) -> PackedTensor:
    """Round a matrix to codes.

    A block that holds NaN or infinity gets a scale that is not finite, so the damage shows in `unpack`.

    Args:
        x: [rows, width] floating point.
        how: format, blocks and rounding.
        noise: FP32 in [0, 1) of the shape of `x`, for stochastic rounding.

    Raises:
        ValueError: the width is not a multiple of what shares bytes: 2 columns of 4 bits, 4 of 6 bits.
    """
    rows, width = x.shape
    shared = columns_that_share_bytes(how.format.bits)
    if width % shared:
        raise ValueError(f"{how.format.name}: the width {width} must be a multiple of {shared}")
    blocks, scales = _scaled_blocks(x, how)
    noise = None if noise is None else _in_blocks(noise, how)
    if isinstance(how.format, FloatFormat) and how.format.dtype is not None and noise is None:
        # torch's own cast rounds as `round_to` does
        codes = blocks.clamp(-how.format.max, how.format.max).to(how.format.dtype).view(torch.int8)
    else:
        codes = encode(round_to(blocks, how.format, noise), how.format)
    codes = _as_matrix(codes, rows, width)
    return PackedTensor(_pack_bits(codes, how.format.bits), scales, how, width)


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [rows, width] of a packed matrix, rounded to `dtype`."""
    codes = _unpack_bits(packed.codes, packed.how.format.bits)
    values = decode(codes, packed.how.format)
    # matrices of several ranks may lie below each other, each with a scale of its own
    rows = packed.how.rows or len(codes) // len(packed.scales)
    blocks = _in_blocks(values, replace(packed.how, rows=rows))
    scaled = blocks * packed.scales.float()[:, None, :, None]
    return _as_matrix(scaled.to(dtype), *values.shape)


def round_blocks(
    x: Tensor, how: Quantization, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """FP32 values that a matrix is worth after rounding, those of `unpack(pack(x))`, and the scales."""
    blocks, scales = _scaled_blocks(x, how)
    noise = None if noise is None else _in_blocks(noise, how)
    rounded = round_to(blocks, how.format, noise) * scales.float()[:, None, :, None]
    return _as_matrix(rounded, *x.shape), scales


def columns_that_share_bytes(bits: int) -> int:
    """Columns whose codes of so many bits fill whole bytes together."""
    return math.lcm(bits, 8) // bits


def _scaled_blocks(x: Tensor, how: Quantization) -> tuple[Tensor, Tensor]:
    """FP32 blocks divided by their scales, and the scales."""
    blocks = _in_blocks(x.float(), how)
    amax = blocks.abs().amax(dim=(1, 3))
    if how.scale == "e8m0":
        scales = _power_of_two_scales(amax, how.format)
    else:
        scales = (amax / how.format.max).to(SCALE_DTYPES[how.scale])
    divisors = scales.float()
    # a block of zeros stays one; the scale itself says 0
    divisors = torch.where(divisors == 0, 1.0, divisors)
    return blocks / divisors[:, None, :, None], scales


def _power_of_two_scales(amax: Tensor, number_format: NumberFormat) -> Tensor:
    _, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    largest = math.frexp(number_format.max)[1]
    scales = torch.ldexp(torch.ones_like(amax), (exponent - largest).clamp(-126, 127))
    scales = torch.where(amax.isfinite(), scales, torch.nan)
    return scales.to(torch.float8_e8m0fnu)


def _in_blocks(x: Tensor, how: Quantization) -> Tensor:
    """[row blocks, rows, column blocks, columns], padded with zeros at the edges."""
    height, width = x.shape
    rows, columns = how.rows or height, how.columns or width
    below, right = -height % rows, -width % columns
    if below or right:
        x = F.pad(x, (0, right, 0, below))
    return x.reshape((height + below) // rows, rows, (width + right) // columns, columns)


def _as_matrix(blocks: Tensor, height: int, width: int) -> Tensor:
    row_blocks, rows, column_blocks, columns = blocks.shape
    whole = blocks.reshape(row_blocks * rows, column_blocks * columns)
    return whole if whole.shape == (height, width) else whole[:height, :width].contiguous()


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    if bits == 4:
        low, high = codes.chunk(2, dim=1)
        return (low & 15) | (high << 4)
    *thirds, last = codes.chunk(4, dim=1)
    parts = [(part & 63) | (((last >> (2 * index)) & 3) << 6) for index, part in enumerate(thirds)]
    return torch.cat(parts, dim=1)


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    if bits == 4:
        # int8 shifts are arithmetic, so they restore the sign
        return torch.cat([(packed << 4) >> 4, packed >> 4], dim=1)
    thirds = packed.chunk(3, dim=1)
    low, middle, high = ((part >> 6) & 3 for part in thirds)
    last = low | (middle << 2) | (high << 4)
    return torch.cat([*(part & 63 for part in thirds), last], dim=1)
