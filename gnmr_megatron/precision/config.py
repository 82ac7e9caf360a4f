"""Which paths a unit can run on; no torch, so that a configuration is checked before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnmr_megatron.errors import ConfigError

PathName = Literal["fp32", "bf16", "saved_int8", "saved_int4"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The two paths of every unit, and how saved activations are quantised.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    low: PathName = "saved_int4"
    """Low-cost path, on which all units run unless they are recovered."""

    recovery: PathName = "saved_int8"
    """High-fidelity path of the units in the recovery set."""

    granularity: Literal["tensor", "token", "group"] = "group"
    """What shares a scale: the whole input (`tensor`), a token, or `group_size` neighbours of a token.
    Scales of `tensor` and `token` span what a rank holds, so there results depend on tensor parallelism."""

    group_size: int = 128
    """Values per scale with `granularity: group`; has to divide the width of every input a rank holds."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`nearest` (ties to even), or `stochastic` (unbiased; own generator for each unit and step)."""

    def __post_init__(self) -> None:
        if self.group_size < 2 or self.group_size % 2:
            raise ConfigError(
                f"precision.group_size: {self.group_size} must be an even number of at least 2"
            )
