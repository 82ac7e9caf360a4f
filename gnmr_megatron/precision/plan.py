"""Which paths each unit runs on: those of the settings, or of the first exception that names it."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnmr_megatron.control.units import Unit
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.precision.catalog import PathName
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.overrides import Override


@dataclass(frozen=True)
class UnitPaths:
    """The paths of one unit.

    Attributes:
        low: path outside the recovery set.
        recovery: path inside it.
        is_fixed: the unit always runs on `low` (which is `recovery`, too) and is no unit of the controller.
        engine: payload in megatron-core's form for a fixed unit.
    """

    low: PathName
    recovery: PathName
    is_fixed: bool = False
    engine: Mapping[str, Any] | None = None


def paths_of_units(units: Sequence[Unit], precision: PrecisionConfig) -> list[UnitPaths]:
    """The paths of every unit, in their order.

    Raises:
        ConfigError: an override matches no unit, `first_last_k` is too large, or no unit is left to control.
    """
    overrides = precision.ordered_overrides()
    globs = [(override.where, override.units) for override in overrides]
    refuse_globs_without_units(globs, [unit.id for unit in units])
    k, num_layers = precision.first_last_k, 1 + max(unit.layer for unit in units)
    if 2 * k > num_layers:
        raise ConfigError(
            f"precision.first_last_k: {k} at either end are more than the {num_layers} layers of the model"
        )
    paths = []
    for unit in units:
        override = next((o for o in overrides if fnmatch.fnmatchcase(unit.id, o.units)), None)
        is_at_end = not k <= unit.layer < num_layers - k
        if override is None and is_at_end:
            paths.append(UnitPaths(precision.recovery, precision.recovery, is_fixed=True))
        else:
            paths.append(_paths(override, precision))
    refuse_if_all_are_fixed(chosen.is_fixed for chosen in paths)
    return paths


def refuse_if_all_are_fixed(are_fixed: Iterable[bool]) -> None:
    """ConfigError where no unit is left to control."""
    if all(are_fixed):
        raise ConfigError(
            "precision: overrides and first_last_k fix all units, so none is left to control; for one path "
            "everywhere, set precision.low and precision.recovery to it"
        )


def _paths(override: Override | None, precision: PrecisionConfig) -> UnitPaths:
    if override is None:
        return UnitPaths(precision.low, precision.recovery)
    if override.fixed is not None:
        return UnitPaths(override.fixed, override.fixed, is_fixed=True, engine=override.engine)
    return UnitPaths(override.low or precision.low, override.recovery or precision.recovery)


def refuse_globs_without_units(globs: Sequence[tuple[str, str]], ids: Sequence[str]) -> None:
    """ConfigError for the first glob, with its place in the settings, that matches no unit."""
    for where, glob in globs:
        if any(fnmatch.fnmatchcase(unit_id, glob) for unit_id in ids):
            continue
        nearest = difflib.get_close_matches(glob, ids, n=3, cutoff=0)
        raise ConfigError(f"{where}: '{glob}' matches no unit; nearest: {', '.join(nearest)}")
