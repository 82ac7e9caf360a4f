"""Which paths units can run on; no torch, so that a configuration is checked before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gnmr_megatron.errors import ConfigError
from gnmr_megatron.precision.catalog import Granularity, PathName
from gnmr_megatron.precision.overrides import Override, overrides_of_recipe, parse_override


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The two paths of every unit, exceptions for some of them, and how values are quantised.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    low: PathName = "saved_int4"
    """Low-cost path, on which all units run unless they are recovered."""

    recovery: PathName = "saved_int8"
    """High-fidelity path of the units in the recovery set."""

    overrides: list[dict[str, str]] = field(default_factory=list)
    """Exceptions, the first match wins: `{units: GLOB, low: PATH, recovery: PATH}`, or `{units: GLOB, fixed: PATH}`
    for units that always run on PATH and are never recovered. GLOB is matched against the unit's id."""

    first_last_k: int = 0
    """So many layers at either end are fixed on the recovery path, where no override says otherwise."""

    recipe: str | None = None
    """YAML file with `configs:` and `matchers:`, as megatron-core's quantization recipes; its matchers follow
    the overrides. A config may also be `{low: PATH, recovery: PATH}` or `{fixed: PATH}`."""

    granularity: Granularity = "group"
    """What shares a scale on saved and emulated paths: the whole input (`tensor`), a token, `group_size` neighbours
    of a token (`group`); for emulated paths, too, `block`: groups, and squares of weights; `mx`: 32 neighbours and
    a power of two. Scales of `tensor` and `token` span what a rank holds, so there results depend on the layout."""

    group_size: int = 128
    """Values per scale with `group` and `block`; has to divide the width of every input a rank holds."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`nearest` (ties to even), or `stochastic` (unbiased below the largest value; a function of seed, unit and
    step); not for `torch_*` and `te_*` paths."""

    fuse: bool | None = None
    """Compile quantisation into fused kernels, where a compiler is found (C++ for CPUs, Triton for GPUs): the same bits
    at a fraction of the cost. null: on GPUs only, because on a CPU it takes half a minute the first time."""

    def __post_init__(self) -> None:
        if self.group_size < 2 or self.group_size % 2:
            raise ConfigError(
                f"precision.group_size: {self.group_size} must be an even number of at least 2"
            )
        if self.first_last_k < 0:
            raise ConfigError(f"precision.first_last_k: {self.first_last_k} must not be negative")
        self.ordered_overrides()

    def ordered_overrides(self) -> tuple[Override, ...]:
        """Overrides of the settings, then those of the recipe file.

        Raises:
            ConfigError: an override or the file is malformed.
        """
        own = [
            parse_override(item, where=f"precision.overrides[{index}]")
            for index, item in enumerate(self.overrides)
        ]
        return (*own, *(overrides_of_recipe(self.recipe) if self.recipe else ()))
