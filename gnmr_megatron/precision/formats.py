"""Number formats that values can be rounded to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NumberFormat:
    """An integer format with a symmetric range.

    Attributes:
        name: as in path names.
        bits: size of one code.
        max: largest code; the smallest is its negative, so that zero is exact and the range symmetric.
    """

    name: str
    bits: int
    max: int


INT8 = NumberFormat("int8", bits=8, max=127)
INT4 = NumberFormat("int4", bits=4, max=7)
