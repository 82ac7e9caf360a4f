"""The one place where a unit changes its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from megatron.core import parallel_state

from gnmr_megatron.control.statistics import IntArray
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.models.initialization import stable_seed
from gnmr_megatron.models.recoverable_linear import RecoverableLinear
from gnmr_megatron.precision.paths import PrecisionPath


class Switchboard:
    """Holds the linears of this rank and puts each on the path that a recovery set gives it.

    Important:
        Call `apply` between steps only: recompute and microbatches in flight have to see one path.

    Args:
        units: all units of the model.
        linears: recoverable linears of this rank by global name.
        low: path of units outside the recovery set.
        recovery: path of units inside it.
        seed: seed of stochastic rounding.
    """

    def __init__(
        self,
        units: UnitTable,
        linears: Mapping[str, RecoverableLinear],
        *,
        low: PrecisionPath,
        recovery: PrecisionPath,
        seed: int = 0,
    ) -> None:
        self.low, self.recovery = low, recovery
        self._seed = seed
        self._linears = {units.index(name): linear for name, linear in linears.items()}
        is_stochastic = any(
            path.saved_input is not None and path.saved_input.rounding == "stochastic"
            for path in (low, recovery)
        )
        for name, linear in linears.items():
            linear.unit_id = name
            linear.path = low
            linear.generator = torch.Generator(linear.weight.device) if is_stochastic else None

    def apply(self, recovery_set: IntArray, *, step: int) -> None:
        """Set every unit's path, and its rounding noise, for the coming step.

        Args:
            recovery_set: int64 unit indices on the recovery path.
            step: number of the coming step; with the seed it determines the noise, so that a resumed run
                rounds as one that was never interrupted.
        """
        recovered = set(recovery_set.tolist())
        for index, linear in self._linears.items():
            linear.path = self.recovery if index in recovered else self.low
            if linear.generator is not None:
                linear.generator.manual_seed(
                    stable_seed(self._seed, linear.unit_id, step, *_shard())
                )

    @contextmanager
    def all_on(self, path: PrecisionPath) -> Iterator[None]:
        """Every unit on one path within the block, as for an evaluation."""
        before = {index: linear.path for index, linear in self._linears.items()}
        try:
            for linear in self._linears.values():
                linear.path = path
            yield
        finally:
            for index, linear in self._linears.items():
                linear.path = before[index]


def _shard() -> tuple[int, int]:
    """Which noise a rank draws: that of its part of the weights and of the batch."""
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
