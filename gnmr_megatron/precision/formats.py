"""Number formats: rounding to them, and their codes.

Floating-point formats follow the OCP specifications (8-bit Floating Point 1.0; Microscaling Formats MX 1.0).
"""

from __future__ import annotations

import math
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

    @property
    def num_binades(self) -> int:
        """Powers of two between which the normal numbers lie."""
        return math.frexp(self.max)[1] - self.min_exponent


INT8 = IntegerFormat("int8", bits=8, max=127)
INT4 = IntegerFormat("int4", bits=4, max=7)
INT3 = IntegerFormat("int3", bits=3, max=3)
INT2 = IntegerFormat("int2", bits=2, max=1)
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
    rounded = round_finite(x, number_format, noise)
    has_infinity = isinstance(number_format, FloatFormat) and number_format.has_infinity
    return torch.where(x.isinf(), x if has_infinity else torch.nan, rounded)


def round_finite(x: Tensor, number_format: NumberFormat, noise: Tensor | None = None) -> Tensor:
    """As `round_to`, for values that are finite or NaN."""
    largest = number_format.max
    if not isinstance(number_format, FloatFormat):
        return _round(x, noise).clamp(-largest, largest)
    if number_format.dtype is not None and noise is None:
        return x.clamp(-largest, largest).to(number_format.dtype).float()
    quantum = _quantum(x.abs(), number_format)
    return (_round(x.abs() / quantum, noise) * quantum).clamp(max=largest).copysign(x)


def encode(x: Tensor, number_format: NumberFormat, noise: Tensor | None = None) -> Tensor:
    """Codes of the values that `round_finite` rounds to.

    Args:
        x: FP32, any shape; codes of NaN mean nothing.
        number_format: format of the codes.
        noise: as for `round_to`.

    Returns:
        int8 or int32 of the same shape: two's complement, or sign and magnitude in the lowest `bits` bits.
    """
    if not isinstance(number_format, FloatFormat):
        rounded = round_finite(x, number_format, noise)
        return rounded.to(torch.int8 if number_format.bits == 8 else torch.int32)
    if number_format.dtype is not None:
        largest = number_format.max
        rounded = x if noise is None else round_finite(x, number_format, noise)
        # torch's own cast rounds as `round_finite` does
        return rounded.clamp(-largest, largest).to(number_format.dtype).view(torch.int8)
    sign_bit = 2.0 ** (number_format.bits - 1)
    start, quantum = _binade(x.abs(), number_format, of_values=True)
    # rounding up out of a binade gives the first code of the next
    magnitude = (start + _round(x.abs() / quantum, noise)).clamp(max=sign_bit - 1)
    is_negative = torch.ones_like(x).copysign(x) < 0
    return (magnitude + torch.where(is_negative, sign_bit, 0.0)).to(torch.int32)


def decode(codes: Tensor, number_format: NumberFormat) -> Tensor:
    """FP32 values of int8 or int32 codes; the inverse of `encode`. Sign-extended codes do as well."""
    if not isinstance(number_format, FloatFormat):
        return codes.float()
    if number_format.dtype is not None:
        return codes.view(number_format.dtype).float()
    sign_bit = 1 << (number_format.bits - 1)
    magnitude = (codes & (sign_bit - 1)).float()
    start, quantum = _binade(magnitude, number_format, of_values=False)
    value = (magnitude - start) * quantum
    return torch.where((codes & sign_bit) != 0, -value, value)


def _quantum(magnitude: Tensor, number_format: FloatFormat) -> Tensor:
    """Distance of the format's values around each absolute value."""
    if number_format.dtype is None:
        return _binade(magnitude, number_format, of_values=True)[1]
    power = (magnitude.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return power.clamp(min=2.0**number_format.min_exponent) * 2.0**-number_format.mantissa_bits


def _binade(
    magnitude: Tensor, number_format: FloatFormat, *, of_values: bool
) -> tuple[Tensor, Tensor]:
    """By how much codes in the binade exceed the steps of their values, and how large a step is.

    For formats of a few binades, by comparing: compiled kernels have no vector code for reading exponent bits.

    Args:
        magnitude: absolute values, or codes without their sign.
        number_format: their format.
        of_values: which of the two.
    """
    steps, least = 2.0**number_format.mantissa_bits, 2.0**number_format.min_exponent
    start, quantum = torch.zeros_like(magnitude), torch.full_like(magnitude, least / steps)
    for binade in range(1, number_format.num_binades):
        first = least * 2.0**binade if of_values else (binade + 1) * steps
        start = torch.where(magnitude >= first, binade * steps, start)
        quantum = torch.where(magnitude >= first, least * 2.0**binade / steps, quantum)
    return start, quantum


def _round(x: Tensor, noise: Tensor | None) -> Tensor:
    if noise is None:
        return x.round()
    below = x.floor()
    return below + (noise < x - below)  # x + noise would round by itself
