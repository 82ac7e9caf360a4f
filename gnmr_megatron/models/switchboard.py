"""The one place where a unit changes its path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from megatron.core import parallel_state

from gnmr_megatron.control.statistics import IntArray
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.models.frozen_weights import ParkedWeight, frozen_path
from gnmr_megatron.models.initialization import stable_seed
from gnmr_megatron.models.precision_plan import UnitPlan
from gnmr_megatron.models.recoverable_linear import RecoverableLinear
from gnmr_megatron.precision.catalog import PATHS, PathName
from gnmr_megatron.precision.frozen import FrozenPath
from gnmr_megatron.precision.paths import PrecisionPath
from gnmr_megatron.precision.quantizer import Quantizer


class PathSwitch(Protocol):
    """How one linear is put on a path."""

    def select(self, path: PathName) -> None:
        """Run on that path from the next forward on."""

    def start_step(self, seed: Callable[[], int]) -> None:
        """Begin an optimizer step; what is random in it follows from `seed()`."""

    def take_non_finite(self) -> int:
        """Blocks of quantised values with NaN or infinity since the last call."""


class LinearSwitch:
    """Switch of our own linears.

    Args:
        linear: the linear.
        unit_id: its global name.
        paths: the paths it can run on.
    """

    def __init__(
        self,
        linear: RecoverableLinear,
        unit_id: str,
        paths: Mapping[PathName, PrecisionPath],
    ) -> None:
        self._linear, self._paths = linear, paths
        has_packed_weight = any(isinstance(path, FrozenPath) for path in paths.values())
        self._parked = ParkedWeight(linear) if has_packed_weight else None
        self._quantizer = Quantizer()
        linear.unit_id, linear.quantizer = unit_id, self._quantizer

    def select(self, path: PathName) -> None:
        """See `PathSwitch`."""
        self._linear.path = self._paths[path]
        if self._parked is None:
            return
        if isinstance(self._linear.path, FrozenPath):
            self._parked.park()
        else:
            self._parked.fetch()

    def start_step(self, seed: Callable[[], int]) -> None:
        """See `PathSwitch`."""
        self._quantizer.start_step(seed)

    def take_non_finite(self) -> int:
        """See `PathSwitch`."""
        return self._quantizer.take_non_finite()


class Switchboard:
    """Puts each linear of this rank on the path that a recovery set gives it, at the start of a step.

    Recompute and microbatches in flight have to see one path, so what is asked for during a step takes effect at
    the next.

    Args:
        plans: the paths of all projections of the model.
        switches: those of this rank by global name.
        seed: seed of stochastic rounding.
    """

    def __init__(
        self, plans: Sequence[UnitPlan], switches: Mapping[str, PathSwitch], *, seed: int = 0
    ) -> None:
        self._plans = {plan.unit.id: plan for plan in plans}
        self._switches = dict(switches)
        self._units = recoverable_units(plans)
        self._seed, self._step = seed, 0
        self._recovered: frozenset[str] = frozenset()
        self._requested: frozenset[str] = frozenset()
        self._select()

    def request(self, recovery_set: IntArray) -> None:
        """Ask for a recovery set from the next step on.

        Args:
            recovery_set: int64 unit indices.
        """
        self._requested = frozenset(self._units.ids[index] for index in recovery_set.tolist())

    def start_step(self, step: int) -> None:
        """Put every unit on its path for a step.

        Args:
            step: its number; with the seed it determines the rounding noise, so that a resumed run rounds as one
                that was never interrupted.
        """
        self._recovered = self._requested
        self._step = step
        self._select()
        self._start_noise("training")

    def try_out(self, recovered: Collection[str], step: int) -> None:
        """Put just these units on their recovery paths, with the noise of a step, until `start_step` is called."""
        self._recovered, self._step = frozenset(recovered), step
        self._select()
        self._start_noise("training")

    @contextmanager
    def evaluating(self, *, on_recovery: bool) -> Iterator[None]:
        """Every unit on its recovery path within the block, or on its low path, and with noise of its own.

        For use between steps.
        """
        recovered = self._recovered
        try:
            self._recovered = frozenset(self._units.ids if on_recovery else ())
            self._select()
            self._start_noise("evaluation")
            yield
        finally:
            self._recovered = recovered
            self._select()

    def take_non_finite(self) -> dict[str, int]:
        """Blocks of quantised values with NaN or infinity on this rank since the last call, by linear.

        Waits for the device, so it is for steps that went wrong.
        """
        counts = {name: switch.take_non_finite() for name, switch in self._switches.items()}
        return {name: count for name, count in counts.items() if count}

    def _start_noise(self, purpose: str) -> None:
        place = (self._step, purpose, *_shard())
        for name, switch in self._switches.items():
            switch.start_step(functools.partial(stable_seed, self._seed, name, *place))

    def _select(self) -> None:
        for name, switch in self._switches.items():
            plan = self._plans[name]
            switch.select(plan.recovery if name in self._recovered else plan.low)


def recoverable_units(plans: Sequence[UnitPlan]) -> UnitTable:
    """The units that the controller decides over: all but the fixed ones."""
    return UnitTable(plan.unit for plan in plans if not plan.is_fixed)


def linear_switches(
    plans: Sequence[UnitPlan],
    linears: Mapping[str, torch.nn.Module],
    paths: Mapping[PathName, PrecisionPath],
) -> dict[str, PathSwitch]:
    """Switches of our own linears by global name.

    Args:
        plans: the paths of all projections of the model.
        linears: projections of this rank by global name.
        paths: those that linears share; each has its own of frozen weights.
    """
    by_id = {plan.unit.id: plan for plan in plans}
    switches: dict[str, PathSwitch] = {}
    for name, linear in linears.items():
        assert isinstance(linear, RecoverableLinear)  # ours, since no path is te_*
        own = {
            path: frozen_path(path, linear) if PATHS[path].family == "frozen" else paths[path]
            for path in by_id[name].paths
        }
        switches[name] = LinearSwitch(linear, name, own)
    return switches


def _shard() -> tuple[int, int]:
    """Which noise a rank draws: that of its part of the weights and of the batch."""
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
