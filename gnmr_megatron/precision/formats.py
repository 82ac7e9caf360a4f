"""Number formats: rounding to them, and their codes.

Floating-point formats follow the OCP specifications (8-bit Floating Point 1.0; Microscaling Formats MX 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT_BITS = 0x7F800000  # of an FP32 number


@dataclass(frozen=True)
class NumberFormat:
    """What values a code of `bits` bits can have.

    Attributes:
        name: as in path names.
        bits: size of one code.
        max: largest finite value; the smallest is its negative.
    """

    name: str
    bits: int
    max: float


@dataclass(frozen=True)
class IntegerFormat(NumberFormat):
    """Integers of a symmetric range, so that zero is exact; codes are two's complement."""


@dataclass(frozen=True)
class FloatFormat(NumberFormat):
    """Sign, exponent and mantissa, with subnormals.

    Attributes:
        mantissa_bits: stored bits of the fraction.
        min_exponent: exponent of the smallest normal number; 1 - bias.
        has_infinity: whether codes for infinity exist; an infinite value becomes NaN where they do not.
        dtype: torch's own type of this format, where it has one.
    """

    mantissa_bits: int
    min_exponent: int
    has_infinity: bool = False
    dtype: torch.dtype | None = None


INT8 = IntegerFormat("int8", bits=8, max=127)
INT4 = IntegerFormat("int4", bits=4, max=7)
E4M3 = FloatFormat(
    "fp8_e4m3", bits=8, max=448, mantissa_bits=3, min_exponent=-6, dtype=torch.float8_e4m3fn
)
E5M2 = FloatFormat(
    "fp8_e5m2",
    bits=8,
    max=57344,
    mantissa_bits=2,
    min_exponent=-14,
    has_infinity=True,
    dtype=torch.float8_e5m2,
)
E3M2 = FloatFormat("fp6_e3m2", bits=6, max=28, mantissa_bits=2, min_exponent=-2)
E2M3 = FloatFormat("fp6_e2m3", bits=6, max=7.5, mantissa_bits=3, min_exponent=0)
E2M1 = FloatFormat("fp4_e2m1", bits=4, max=6, mantissa_bits=1, min_exponent=0)


def round_to(x: Tensor, number_format: NumberFormat, noise: Tensor | None = None) -> Tensor:
    """The value of the format for each value of a tensor.

    Finite values beyond the range saturate. NaN stays NaN, and so does infinity where the format has none: what
    is not finite is never made finite.

    Args:
        x: FP32, any shape.
        number_format: format of the result.
        noise: FP32 in [0, 1), of the shape of `x`: round up where it is below the fraction, which is unbiased.
            None rounds to nearest, ties to even.

    Returns:
        FP32 of the same shape, every value exact in the format; zero keeps its sign.
    """
    if isinstance(number_format, FloatFormat):
        quantum = _power_of_two(x, number_format) * 2.0**-number_format.mantissa_bits
        rounded = _round(x / quantum, noise) * quantum
    else:
        rounded = _round(x, noise)
    rounded = rounded.clamp(-number_format.max, number_format.max)
    if noise is not None:
        rounded = rounded.copysign(x)
    has_infinity = isinstance(number_format, FloatFormat) and number_format.has_infinity
    beyond = x if has_infinity else torch.nan
    return torch.where(x.isinf(), beyond, rounded)


def encode(values: Tensor, number_format: NumberFormat) -> Tensor:
    """Codes of values that are exact in the format.

    Args:
        values: FP32, finite, as `round_to` gives them.
        number_format: their format.

    Returns:
        int8 of the same shape: two's complement, or sign and magnitude in the lowest `bits` bits.
    """
    if not isinstance(number_format, FloatFormat):
        return values.to(torch.int8)
    if number_format.dtype is not None:
        return values.to(number_format.dtype).view(torch.int8)
    power = _power_of_two(values, number_format)
    # steps of one binade lie side by side, so the exponent field only shifts where they start
    binade = (power.view(torch.int32) >> 23) - (127 + number_format.min_exponent)
    steps = (values.abs() / (power * 2.0**-number_format.mantissa_bits)).to(torch.int32)
    magnitude = (binade << number_format.mantissa_bits) + steps
    sign = values.signbit().to(torch.int32) << (number_format.bits - 1)
    return (sign | magnitude).to(torch.int8)


def decode(codes: Tensor, number_format: NumberFormat) -> Tensor:
    """FP32 values of codes; the inverse of `encode`, sign-extended codes of 4 or 6 bits included."""
    if not isinstance(number_format, FloatFormat):
        return codes.float()
    if number_format.dtype is not None:
        return codes.view(number_format.dtype).float()
    bits, mantissa_bits = number_format.bits, number_format.mantissa_bits
    magnitude = codes.to(torch.int32) & ((1 << (bits - 1)) - 1)
    binade = (magnitude >> mantissa_bits).clamp(min=1) - 1
    steps = magnitude - (binade << mantissa_bits)
    quantum = ((binade + (127 + number_format.min_exponent - mantissa_bits)) << 23).view(
        torch.float32
    )
    is_negative = ((codes >> (bits - 1)) & 1).bool()
    value = steps.float() * quantum
    return torch.where(is_negative, -value, value)


def _power_of_two(x: Tensor, number_format: FloatFormat) -> Tensor:
    """Largest power of two not above |x|, but at least that of the smallest normal number."""
    power = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return power.clamp(min=2.0**number_format.min_exponent)


def _round(x: Tensor, noise: Tensor | None) -> Tensor:
    if noise is None:
        return x.round()
    below = x.floor()
    return below + (noise < x - below)  # x + noise would round by itself
