"""Values of a matrix that share a scale: rounding them to a format, and keeping them as codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gnmr_megatron.precision.catalog import ScaleType, columns_that_share_bytes
from gnmr_megatron.precision.formats import NumberFormat, decode, encode, round_finite
from gnmr_megatron.precision.fusion import fused

Rounding = Literal["nearest", "stochastic"]
SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Quantization:
    """How a [rows, width] matrix is turned into codes and scales: value = code * scale.

    Attributes:
        format: format of the codes.
        rows: rows of a block that shares a scale; None for all.
        columns: columns of such a block; None for all. Blocks at the edge may be smaller.
        scale: type of the scales. `fp32` and `bf16` are amax / format.max; `e8m0` is the power of two of the
            Microscaling specification, 2^(floor(log2 amax) - floor(log2 format.max)).
        rounding: to nearest, ties to even; or stochastic, with expectation equal to the value, but for values that
            their scale puts beyond the largest: a little with `bf16`, the top of a block with `e8m0`.
        staleness: what scales are multiplied by. Not 1 only where a fault is injected: above it, small values become
            0; below it, large ones saturate, as with scales that were measured some steps ago.
    """

    format: NumberFormat
    rows: int | None = 1
    columns: int | None = None
    scale: ScaleType = "bf16"
    rounding: Rounding = "nearest"
    staleness: float = 1.0

    @property
    def transposed(self) -> Quantization:
        """The same along the other axis: for a GEMM that contracts rows instead of columns."""
        return replace(self, rows=self.columns, columns=self.rows)

    @property
    def shared_axes(self) -> tuple[int, ...]:
        """Axes of a matrix of groups over which a scale is shared."""
        if self.rows == 1:
            return (1,)
        return (0,) if self.columns == 1 else (0, 1)


@dataclass(frozen=True)
class PackedTensor:
    """Codes and scales of a [rows, width] matrix.

    Attributes:
        codes: int8 [rows, bytes]. Groups of a row that have a scale of their own lie one after the other, a last
            one that is smaller filled with zeros. 8 bits: a code a byte. 6 bits: columns of the first three
            quarters of a group in the low six bits of a byte, those of the last quarter spread over the two high
            bits of the three. 4, 3 and 2 bits: of a group of n, columns c, c + n / k, c + 2 n / k, ... in one
            little-endian word, lowest bits first; k = 2, 8 and 4 codes in words of 1, 3 and 1 bytes, the j-th bytes
            of all words of the group together.
        scales: [rows, groups], [1, width] or [1, 1], of a type of `SCALE_DTYPES`.
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

    Values that share a scale with NaN or infinity get one that is not finite, so the damage shows in `unpack`.

    Args:
        x: [rows, width] floating point.
        how: format, blocks (within a row, of a column, or the whole) and rounding.
        noise: FP32 in [0, 1) of the shape of `x`, for stochastic rounding.

    Raises:
        ValueError: some but not all rows share a scale; or a group is not a multiple of what shares bytes, 2 columns
            of 4 bits, 4 of 6 or 2 bits, 8 of 3 bits.
    """
    if how.rows not in (1, None):
        raise ValueError(f"codes cannot be kept where {how.rows} rows share a scale")
    groups = _row_groups(x, how)
    shared = columns_that_share_bytes(how.format.bits)
    if groups.shape[1] % shared:
        raise ValueError(
            f"{how.format.name}: groups of {groups.shape[1]} columns must be multiples of {shared}"
        )
    noise = None if noise is None else _row_groups(noise, how)
    codes, scales = _pack_groups(
        (groups, noise), how.format, how.scale, how.shared_axes, how.staleness
    )
    return PackedTensor(codes.view(len(x), -1), _by_row(scales, how, len(x)), how, x.shape[1])


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [rows, width] of a packed matrix, rounded to `dtype`.

    Matrices of several ranks may lie below each other, each with its scales.
    """
    how, rows = packed.how, len(packed.codes)
    if how.rows != 1 and len(packed.scales) > 1:
        ranks = len(packed.scales)
        parts = zip(packed.codes.chunk(ranks), packed.scales.chunk(ranks), strict=True)
        return torch.cat(
            [unpack(replace(packed, codes=codes, scales=scales), dtype) for codes, scales in parts]
        )
    per_row = packed.scales.shape[1] if how.rows == 1 else 1
    codes = packed.codes.reshape(rows * per_row, -1)
    scales = packed.scales.reshape(-1, 1) if how.rows == 1 else packed.scales
    values = _unpack_groups((codes, scales), how.format, dtype).view(rows, -1)
    return values if values.shape[1] == packed.width else values[:, : packed.width].contiguous()


def round_blocks(
    x: Tensor, how: Quantization, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """FP32 values that a matrix is worth after rounding, those of `unpack(pack(x))`, and the scales.

    Blocks may span rows, too. Scales are [blocks], in no order that matters.
    """
    if how.columns == 1 and how.rows not in (1, None):
        values, scales = round_blocks(x.t(), how.transposed, None if noise is None else noise.t())
        return values.t(), scales
    is_block = how.rows not in (1, None)
    to_groups = _square_groups if is_block else _row_groups
    groups = to_groups(x, how)
    noise = None if noise is None else to_groups(noise, how)
    axes = (1,) if is_block else how.shared_axes
    values, scales = _round_groups((groups, noise), how.format, how.scale, axes, how.staleness)
    values = _from_squares(values, x.shape, how) if is_block else values.view(len(x), -1)
    return values[:, : x.shape[1]], scales


# Below, matrices of groups: [groups, values], scales of shape [groups, 1], [1, values] or [1, 1].


@fused
def _pack_groups(
    matrices: Sequence[Tensor | None],
    number_format: NumberFormat,
    scale: ScaleType,
    axes: tuple[int, ...],
    staleness: float,
) -> tuple[Tensor, Tensor]:
    groups, noise = matrices
    assert groups is not None
    scaled, scales = _scaled(groups, number_format, scale, axes, staleness)
    codes = encode(scaled, number_format, noise)
    return _pack_bits(codes, number_format.bits), scales


@fused
def _unpack_groups(
    matrices: Sequence[Tensor], number_format: NumberFormat, dtype: torch.dtype
) -> Tensor:
    codes, scales = matrices
    values = decode(_unpack_bits(codes, number_format.bits), number_format)
    return (values * scales.float()).to(dtype)


@fused
def _round_groups(
    matrices: Sequence[Tensor | None],
    number_format: NumberFormat,
    scale: ScaleType,
    axes: tuple[int, ...],
    staleness: float,
) -> tuple[Tensor, Tensor]:
    groups, noise = matrices
    assert groups is not None
    scaled, scales = _scaled(groups, number_format, scale, axes, staleness)
    return round_finite(scaled, number_format, noise) * scales.float(), scales


def _scaled(
    groups: Tensor,
    number_format: NumberFormat,
    scale: ScaleType,
    axes: tuple[int, ...],
    staleness: float,
) -> tuple[Tensor, Tensor]:
    """FP32 values divided by their scales, and the scales."""
    groups = groups.float()
    amax = groups.abs().amax(dim=axes, keepdim=True)
    if staleness != 1.0:
        amax = amax * staleness
    if scale == "e8m0":
        scales = _power_of_two_scales(amax, number_format)
    else:
        # by a tensor: CUDA divides by a Python number with the number's rounded reciprocal
        scales = (amax / amax.new_full((), number_format.max)).to(SCALE_DTYPES[scale])
    divisors = scales.float()
    # zeros stay zeros; the scale itself says 0
    return groups / torch.where(divisors == 0, 1.0, divisors), scales


def _power_of_two_scales(amax: Tensor, number_format: NumberFormat) -> Tensor:
    # an FP32 exponent field is floor(log2) + 127; that of a subnormal number is 0
    exponent = (amax.view(torch.int32) >> 23) - 127
    largest = math.frexp(number_format.max)[1] - 1
    exponent = (exponent - largest).clamp(-126, 127)
    scales = ((exponent + 127) << 23).view(torch.float32)
    return torch.where(amax.isfinite(), scales, torch.nan).to(torch.float8_e8m0fnu)


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    if bits == 6:
        *thirds, last = codes.chunk(4, dim=1)
        parts = [(part & 63) | (((last >> (2 * i)) & 3) << 6) for i, part in enumerate(thirds)]
        return torch.cat([_narrowed(part) for part in parts], dim=1)
    shared = columns_that_share_bytes(bits)
    word, *others = [part & ((1 << bits) - 1) for part in codes.chunk(shared, dim=1)]
    for index, part in enumerate(others, start=1):
        word = word | (part << (bits * index))
    return torch.cat([_narrowed(word >> shift) for shift in range(0, shared * bits, 8)], dim=1)


def _narrowed(codes: Tensor) -> Tensor:
    """The lowest byte of int32. Through FP32, because compiled kernels have vector conversions for that."""
    return (((codes + 128) & 255) - 128).float().to(torch.int8)


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Codes as int8, or int32 where they were packed; sign-extended where the format has 4 bits or less."""
    if bits == 8:
        return packed
    wide = packed.float().to(torch.int32)  # see `_narrowed`
    if bits == 6:
        first, second, third = wide.chunk(3, dim=1)
        last = ((first >> 6) & 3) | (((second >> 6) & 3) << 2) | (((third >> 6) & 3) << 4)
        return torch.cat([first & 63, second & 63, third & 63, last], dim=1)
    shared = columns_that_share_bytes(bits)
    word, *others = [part & 255 for part in wide.chunk(shared * bits // 8, dim=1)]
    for index, part in enumerate(others, start=1):
        word = word | (part << (8 * index))
    tops = [32 - bits * (index + 1) for index in range(shared)]
    return torch.cat([(word << top) >> (32 - bits) for top in tops], dim=1)


def _row_groups(x: Tensor, how: Quantization) -> Tensor:
    """[groups, values] of the rows; whole rows where a scale spans rows."""
    width = x.shape[1]
    size = (how.columns or width) if how.rows == 1 else width
    if width % size:
        x = F.pad(x, (0, -width % size))
    return x.reshape(-1, size)


def _by_row(scales: Tensor, how: Quantization, rows: int) -> Tensor:
    return scales.view(rows, -1) if how.rows == 1 else scales


def _square_groups(x: Tensor, how: Quantization) -> Tensor:
    """[blocks, values] of blocks that span rows and columns, padded with zeros at the edges."""
    height, width, rows, columns = *x.shape, how.rows or 1, how.columns or x.shape[1]
    x = F.pad(x, (0, -width % columns, 0, -height % rows))
    squares = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return squares.transpose(1, 2).reshape(-1, rows * columns)


def _from_squares(groups: Tensor, shape: torch.Size, how: Quantization) -> Tensor:
    height, width, rows, columns = *shape, how.rows or 1, how.columns or shape[1]
    down, across = -(-height // rows), -(-width // columns)
    squares = groups.view(down, across, rows, columns).transpose(1, 2)
    return squares.reshape(down * rows, across * columns)[:height]
