"""Settings of the controller, with the paper's names in the docstrings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gnmr_megatron.errors import ConfigError

PolicyName = Literal[
    "gnmr",
    "static_low",
    "static_high",
    "first_last_k",
    "random",
    "round_robin",
    "top_norm",
    "ema_ratio",
    "zscore",
    "oracle",
    "replay",
]


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Which units run on the recovery path, and when.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    mode: Literal["active", "monitor", "disabled"] = "active"
    """`active` decides and switches; `monitor` decides and logs, never switches; `disabled` measures nothing
    and leaves the gradient norm to megatron-core."""

    policy: PolicyName = "gnmr"
    """Who ranks the units. `gnmr` is the paper's rule; the others are controls for comparison."""

    alpha: float | dict[int, float] = 3.0
    """Threshold on GNMR (long-term departure); a number, or a {step: value} schedule."""

    beta: float | dict[int, float] = 2.0
    """Threshold on delta-GNMR (sudden shock); a number, or a {step: value} schedule."""

    delta: int = 8
    """Number of past GNMR values that delta-GNMR compares with."""

    max_recovered: int | dict[int, int] = 1
    """Budget maxO: units of the whole model on the recovery path at once; a number or a schedule."""

    lock_steps: int = 5
    """T_lock: further steps for which a risky unit stays a candidate once it was selected."""

    warmup_steps: int = 20
    """Steps that only build history."""

    mean: Literal["cumulative", "ema", "window"] = "cumulative"
    """Mean of past norms that GNMR divides by; `cumulative` is the paper's."""

    ema_decay: float = 0.99
    """Decay of the moving means (`mean: ema`, policies `ema_ratio` and `zscore`)."""

    window: int = 128
    """Number of steps in the mean (`mean: window`)."""

    history: Literal["shared", "per_path"] = "shared"
    """`shared`: one mean of a unit's norms, whatever path it was on, as in the paper; `per_path`: one for each path, so
    that a norm that changes only with the path is no departure."""

    fold_switches: bool = True
    """Whether the first step of a unit on another path counts in its history."""

    collapse_ratio: float | None = None
    """Also recover a unit whose GNMR falls below this ratio (between 0 and 1). The paper has no such rule."""

    edge_layers: int = 1
    """k of policy `first_last_k`: layers at each end that are recovered all the time."""

    seed: int = 0
    """Seed of policy `random`."""

    trace: str | None = None
    """Run folder whose decisions policy `replay` repeats."""

    check_interval: int = 100
    """Compare the decision across ranks every so many steps (one small all-gather); 0 never."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ControlConfig:
        """The settings that `dataclasses.asdict` wrote; steps of schedules may be strings, as JSON has them."""
        values: dict[str, Any] = {
            key: {int(step): item for step, item in value.items()}
            if isinstance(value, dict)
            else value
            for key, value in plain.items()
        }
        return cls(**values)

    def __post_init__(self) -> None:
        for key, low in (("delta", 1), ("window", 1), ("edge_layers", 1)):
            _require(
                getattr(self, key) >= low, key, getattr(self, key), f"an integer of at least {low}"
            )
        for key in ("lock_steps", "warmup_steps", "check_interval", "seed"):
            _require(getattr(self, key) >= 0, key, getattr(self, key), "an integer of at least 0")
        for key in ("alpha", "beta"):
            _require(
                _all(getattr(self, key), above=0.0), key, getattr(self, key), "positive and finite"
            )
        _require(
            _all(self.max_recovered, above=-1),
            "max_recovered",
            self.max_recovered,
            "at least 0 and finite",
        )
        _require(0.0 < self.ema_decay < 1.0, "ema_decay", self.ema_decay, "between 0 and 1")
        collapse = self.collapse_ratio
        _require(
            collapse is None or 0.0 < collapse < 1.0,
            "collapse_ratio",
            collapse,
            "between 0 and 1, or null",
        )
        if self.policy == "replay" and self.trace is None:
            raise ConfigError(
                "gnmr.policy: replay needs gnmr.trace, the run folder whose decisions to repeat"
            )


def _all(value: float | dict[int, int] | dict[int, float], *, above: float) -> bool:
    if isinstance(value, dict):
        return len(value) > 0 and all(
            step >= 0 and _all(item, above=above) for step, item in value.items()
        )
    return above < value < math.inf  # inf / inf would be NaN


def _require(is_right: bool, key: str, value: object, wanted: str) -> None:  # noqa: FBT001 - local check
    if not is_right:
        raise ConfigError(f"gnmr.{key}: {value} must be {wanted}")
