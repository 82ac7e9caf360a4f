"""Faults that a run is told to meet, for tests and drills; no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from gnmr_megatron.errors import ConfigError, did_you_mean

_NUMBERS = {"factor": float, "value": float, "seconds": float, "steps": int, "rank": int}
# kind: fields that it needs, and fields that it may have with their defaults
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "scale_gradient": (("unit", "factor"), {}),
    "poison_gradient": (("unit",), {"value": math.nan}),
    "activation_burst": (("unit", "factor"), {"steps": 1}),
    "stale_scale": (("unit", "factor"), {"steps": 1}),
    "learning_rate_spike": (("factor",), {"steps": 1}),
    "bad_batch": ((), {}),
    "slow_rank": (("rank", "seconds"), {}),
    "kill_rank": (("rank",), {}),
    "full_disk": ((), {"steps": 1}),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of `KINDS`.
        step: the step in which it happens first.
        steps: steps in a row in which it happens.
        unit: glob on the ids of the units that it concerns.
        rank: the rank that it concerns.
        factor: what gradients, outliers, scales or the learning rate are multiplied by.
        value: what a gradient is overwritten with.
        seconds: how long a rank stands still.
    """

    kind: str
    step: int
    steps: int = 1
    unit: str | None = None
    rank: int | None = None
    factor: float = 1.0
    value: float = math.nan
    seconds: float = 0.0

    def happens_in(self, step: int) -> bool:
        """Whether a step is one of its own."""
        return self.step <= step < self.step + self.steps

    def units_among(self, ids: tuple[str, ...] | list[str]) -> list[str]:
        """The ids that its glob matches."""
        return [name for name in ids if self.unit is not None and fnmatchcase(name, self.unit)]


def parse_fault(item: Mapping[str, Any], *, where: str) -> Fault:
    """A fault from its mapping.

    Raises:
        ConfigError: an unknown kind or key, a missing one, or a value that is no number.
    """
    if not isinstance(item, Mapping) or "kind" not in item or "step" not in item:
        raise ConfigError(f"{where}: must be a mapping with `kind` and `step`")
    kind = str(item["kind"])
    if kind not in KINDS:
        raise ConfigError(
            f"{where}.kind: no `{kind}`{did_you_mean(kind, list(KINDS), list_all=True)}"
        )
    needed, optional = KINDS[kind]
    known = ("kind", "step", *needed, *optional)
    for key in item:
        if key not in known:
            raise ConfigError(f"{where}: {kind} has no `{key}`{did_you_mean(str(key), known)}")
    missing = [key for key in needed if key not in item]
    if missing:
        raise ConfigError(f"{where}: {kind} needs {', '.join(f'`{key}`' for key in missing)}")
    values: dict[str, Any] = {**optional, **item}
    for key, number in {"step": int, **_NUMBERS}.items():
        if key in values:
            values[key] = _number(values[key], number, f"{where}.{key}")
    if values["step"] < 1 or values.get("steps", 1) < 1:
        raise ConfigError(f"{where}: `step` and `steps` must be at least 1")
    return Fault(**values)


def _number(value: Any, number: type, where: str) -> Any:
    try:
        return number(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {value!r} is no {number.__name__}") from error


def fault_problems(
    faults: list[Fault], ids: list[str], world_size: int, *, with_scales: Collection[str]
) -> list[str]:
    """One line for each fault that concerns a unit, scale or rank that the run does not have.

    Args:
        faults: of the settings.
        ids: all units.
        world_size: number of ranks.
        with_scales: units whose low path measures scales of its own.
    """
    problems = []
    for index, fault in enumerate(faults):
        if fault.unit is not None and not fault.units_among(ids):
            hint = did_you_mean(fault.unit, ids)
            problems.append(f"faults[{index}].unit: '{fault.unit}' matches no unit{hint}")
        elif fault.kind == "stale_scale" and not set(fault.units_among(ids)) & set(with_scales):
            problems.append(
                f"faults[{index}]: the low path of '{fault.unit}' keeps no scales of ours; stale_scale is for saved, "
                "emulated and deepseek_* paths"
            )
        if fault.rank is not None and not 0 <= fault.rank < world_size:
            problems.append(f"faults[{index}].rank: {fault.rank}, but there are {world_size} ranks")
    return problems
