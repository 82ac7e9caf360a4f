"""The paths of linears of plain torch, and the switch between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from gnmr_megatron.control.units import Unit
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.precision.catalog import PATHS, misfits
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.fusion import use_fused_kernels
from gnmr_megatron.precision.module import PathLinear, add_paths
from gnmr_megatron.precision.plan import UnitPaths
from gnmr_megatron.precision.registry import precision_path


class UnitSwitches:
    """Puts each linear on the path that a recovery set gives it.

    Args:
        linears: by name.
        paths: of each.
        precision: settings of the paths.
        device: of the linears.
    """

    def __init__(
        self,
        linears: Mapping[str, torch.nn.Linear],
        paths: Mapping[str, UnitPaths],
        precision: PrecisionConfig,
        device: torch.device,
    ) -> None:
        fuse = device.type != "cpu" if precision.fuse is None else precision.fuse
        use_fused_kernels(enabled=fuse, device=device)
        named = {name for chosen in paths.values() for name in (chosen.low, chosen.recovery)}
        built = {name: precision_path(name, precision) for name in named}
        self._linears: dict[str, PathLinear] = {
            name: add_paths(linear) for name, linear in linears.items()
        }
        self._low = {name: built[chosen.low] for name, chosen in paths.items()}
        self._recovery = {name: built[chosen.recovery] for name, chosen in paths.items()}

    def start_step(self, step: int, recovered: Sequence[str]) -> None:
        """Every forward and backward until the next call runs on these paths.

        Args:
            step: its number; rounding noise follows from it, so that a resumed run rounds alike.
            recovered: units on the recovery path.
        """
        chosen = frozenset(recovered)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for place, (name, linear) in enumerate(self._linears.items()):
            linear.path = (self._recovery if name in chosen else self._low)[name]
            seed = np.random.SeedSequence((rank, step, place))
            linear.quantizer.start_step(functools.partial(_draw, seed))


def _draw(seed: np.random.SeedSequence) -> int:
    """63 bits."""
    return int(seed.generate_state(1, np.uint64)[0] >> np.uint64(1))


def refuse_misfits(
    units: Sequence[Unit], paths: Sequence[UnitPaths], precision: PrecisionConfig
) -> None:
    """Raise where a path cannot run a linear.

    Raises:
        ConfigError: names the path, the unit and what would do.
    """
    common_width = math.gcd(*(unit.shape[1] for unit in units))
    for unit, chosen in zip(units, paths, strict=True):
        for path in (chosen.low, chosen.recovery):
            if PATHS[path].family == "te":
                raise ConfigError(
                    f"precision: {path} is run by Transformer Engine's modules, and {unit.id} is a torch.nn.Linear; "
                    "take another path"
                )
            problems = misfits(
                path,
                granularity=precision.granularity,
                group_size=precision.group_size,
                held=unit.shape,
                common_width=common_width,
                tokens=0,  # of any number
            )
            for problem in problems:
                raise ConfigError(f"{problem} (unit {unit.id})")
