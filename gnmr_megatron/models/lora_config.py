"""Settings of low-rank adapters; no torch, so that a configuration is checked before it is loaded."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field

from gnmr_megatron.errors import ConfigError

LORA_FAMILIES = ("exact", "saved", "frozen")
"""Families of paths that units with adapters can run on."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on projections whose own weights are frozen: W x + alpha / rank * B A x.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    rank: int = 0
    """Rows of A and columns of B; 0 trains the whole model, without adapters."""

    alpha: float = 16.0
    """What A and B contribute is multiplied by alpha / rank."""

    dropout: float = 0.0
    """Share of the adapters' inputs that is set to zero in training."""

    units: list[str] = field(default_factory=lambda: ["*"])
    """Globs on the ids of the units that get adapters. The others are frozen, run on their low path and are not
    controlled."""

    base: str | None = None
    """Where the frozen weights come from: a checkpoint, what `convert` wrote, or a run folder, whose newest checkpoint
    is taken; null for `init_from`. With rank > 0 one of them is needed, also to resume."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank: {self.rank} must not be negative")
        if self.alpha <= 0:
            raise ConfigError(f"lora.alpha: {self.alpha} must be positive")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout: {self.dropout} must be in [0, 1)")
        if not self.units:
            raise ConfigError("lora.units: is empty; set lora.rank: 0 for no adapters")

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    def adapts(self, unit_id: str) -> bool:
        """Whether a unit gets an adapter."""
        return self.is_on and any(fnmatch.fnmatchcase(unit_id, glob) for glob in self.units)
