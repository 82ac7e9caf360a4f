"""What one linear quantises with: its rounding noise, and its count of values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gnmr_megatron.precision.quantization import PackedTensor, Quantization, pack, round_blocks

Pass = Literal["forward", "forward without gradients", "backward"]
_SEED_MASK = 2**63 - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd, so that neighbouring passes differ in all bits


class Quantizer:
    """Quantises the operands of one linear.

    Noise is a function of the step's seed and of the number of the pass, not of what was drawn before. So a
    forward that recompute runs twice, once without gradients and once with, rounds alike both times.
    """

    def __init__(self) -> None:
        self.staleness = 1.0
        """See `Quantization.staleness`; of all that this linear quantises."""
        self._seed: Callable[[], int] = int
        self._passes: dict[Pass, int] = {}
        self._place = 0  # of the current pass among those of the step
        self._generators: dict[torch.device, torch.Generator] = {}
        self._non_finite: Tensor | None = None

    def start_step(self, seed: Callable[[], int]) -> None:
        """Begin an optimizer step whose noise follows from `seed()`, which is called only if noise is drawn."""
        self._seed = seed
        self._passes.clear()
        self._generators.clear()
        self._non_finite = None

    def start_pass(self, kind: Pass) -> None:
        """Begin a pass over one microbatch."""
        number = self._passes.get(kind, 0)
        self._passes[kind] = number + 1
        self._place = 2 * number + (kind == "backward")
        self._generators.clear()

    def pack(self, x: Tensor, how: Quantization) -> PackedTensor:
        """Codes and scales of a matrix; see `quantization.pack`."""
        packed = pack(x, self._as_stale(how), self._noise(x, how))
        self._count(packed.scales)
        return packed

    def round(self, x: Tensor, how: Quantization) -> Tensor:
        """FP32 values of a matrix after rounding; see `quantization.round_blocks`."""
        values, scales = round_blocks(x, self._as_stale(how), self._noise(x, how))
        self._count(scales)
        return values

    def take_non_finite(self) -> int:
        """Blocks with NaN or infinity met in this step, since the last call. Waits for the device."""
        count = 0 if self._non_finite is None else int(self._non_finite.item())
        self._non_finite = None
        return count

    def _as_stale(self, how: Quantization) -> Quantization:
        return how if self.staleness == 1.0 else replace(how, staleness=self.staleness)

    def _noise(self, x: Tensor, how: Quantization) -> Tensor | None:
        if how.rounding == "nearest":
            return None
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(x.device)
            generator.manual_seed((self._seed() + _STRIDE * self._place) & _SEED_MASK)
            self._generators[x.device] = generator
        return torch.rand(x.shape, generator=generator, device=x.device)

    def _count(self, scales: Tensor) -> None:
        broken = scales.float().isfinite().logical_not().sum()
        self._non_finite = broken if self._non_finite is None else self._non_finite + broken
