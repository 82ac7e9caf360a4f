"""Make the faults of `faults:` happen. What detects and survives them does not know that they were made."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnmr_megatron.data.batches import Batch, GivesBatches
from gnmr_megatron.models.discovery import unit_parameters
from gnmr_megatron.models.recoverable_linear import RecoverableLinear
from gnmr_megatron.training.fault_settings import Fault
from gnmr_megatron.training.optimizer import ClippingOptimizer
from gnmr_megatron.training.pipeline import NOTHING_TO_TELL, BatchLoss, RankStatus, RunsBatches
from gnmr_megatron.training.recorder import RecordsRun


class FaultInjection:
    """Stands between loop, data and model, and does to each step what the faults say.

    Important:
        Every rank has the same faults, so all know of each one.

    Args:
        faults: what is to happen.
        batches: the run's batches.
        model: the run's model.
        optimizer: the run's optimizer.
        linears: this rank's projections by global name.
        low_paths: low path of every unit by global name; scales become stale on it alone.
        recorder: is told of each fault.
        folder: of the run; remembers which rank was killed already, so that a restart goes on.
        rank: of this process.
        step: steps done.
        vocab_size: tokens of a bad batch are drawn from it.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        batches: GivesBatches,
        model: RunsBatches,
        optimizer: ClippingOptimizer,
        linears: Mapping[str, torch.nn.Module],
        low_paths: Mapping[str, str],
        recorder: RecordsRun,
        folder: Path,
        rank: int,
        step: int,
        vocab_size: int,
    ) -> None:
        self._faults, self._batches, self._model = list(faults), batches, model
        self._optimizer, self._linears, self._low_paths = optimizer, linears, low_paths
        self._spike: tuple[float, float] | None = None  # usual and changed learning rate
        self._recorder, self._folder, self._rank = recorder, folder, rank
        self._step, self._vocab_size = step, vocab_size
        self._limit: tuple[int, int] | None = None
        self._done = [f for f in faults if f.kind == "kill_rank" and self._marker(f).exists()]
        for name, linear in linears.items():
            if any(f.kind == "activation_burst" and name in f.units_among([name]) for f in faults):
                linear.register_forward_pre_hook(_Burst(self, name))

    def now(self, kind: str) -> list[Fault]:
        """The faults of a kind that happen in this step."""
        return [f for f in self._faults if f.kind == kind and f.happens_in(self._step)]

    def next_step(self) -> list[Batch]:
        """Batches of the coming step, after what happens before it."""
        self._step += 1
        self._tell()
        self._fill_or_free_disk()
        for fault in self.now("kill_rank"):
            if fault.rank == self._rank and fault not in self._done:
                self._marker(fault).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        for fault in self.now("slow_rank"):
            if fault.rank == self._rank:
                time.sleep(fault.seconds)
        batches = self._batches.next_step()
        return [self._spoiled(batch) for batch in batches] if self.now("bad_batch") else batches

    def zero_grad_buffers(self) -> None:
        """See `RunsBatches`."""
        self._model.zero_grad_buffers()

    def forward_backward(
        self, batches: Sequence[Batch], status: RankStatus = NOTHING_TO_TELL
    ) -> BatchLoss:
        """Accumulate gradients, then change those that faults concern."""
        self._let_scales_be_stale()
        self._change_learning_rate()
        loss = self._model.forward_backward(batches, status)
        for fault in (*self.now("scale_gradient"), *self.now("poison_gradient")):
            for name in fault.units_among(list(self._linears)):
                for parameter in unit_parameters(self._linears[name]):
                    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # engine's buffer
                    if fault.kind == "scale_gradient":
                        gradient.mul_(fault.factor)
                    else:
                        gradient.fill_(fault.value)
        return loss

    def _let_scales_be_stale(self) -> None:
        """Recovered units measure theirs anew: that is what the recovery path is for."""
        for name, linear in self._linears.items():
            factors = [f.factor for f in self.now("stale_scale") if f.units_among([name])]
            if isinstance(linear, RecoverableLinear) and linear.quantizer is not None:
                is_low = linear.path.name == self._low_paths[name]
                linear.quantizer.staleness = math.prod(factors) if is_low else 1.0

    def _change_learning_rate(self) -> None:
        usual, changed = self._spike or (0.0, math.nan)
        if (
            self._optimizer.learning_rate == changed
        ):  # the step was skipped, and the scheduler left it
            self._optimizer.scale_learning_rate(usual / changed)
        self._spike = None
        factor = math.prod(fault.factor for fault in self.now("learning_rate_spike"))
        if factor != 1.0:
            usual = self._optimizer.learning_rate
            self._optimizer.scale_learning_rate(factor)
            self._spike = usual, self._optimizer.learning_rate

    def _tell(self) -> None:
        for fault in self._faults:
            if fault.happens_in(self._step) and fault not in self._done:
                details = {"factor": fault.factor, "seconds": fault.seconds}
                told = [
                    f"{key} {value:g}" for key, value in details.items() if value not in (1.0, 0.0)
                ]
                self._recorder.fault(
                    self._step,
                    kind="injected",
                    rank=fault.rank,
                    units=fault.units_among(list(self._low_paths)),
                    message=" ".join([fault.kind, *told]),
                )

    def _marker(self, fault: Fault) -> Path:
        return self._folder / f"killed_rank_{fault.rank}_in_step_{fault.step}"

    def _fill_or_free_disk(self) -> None:
        """Let files of this process grow no more, or again; children that write checkpoints inherit it."""
        is_full = bool(self.now("full_disk"))
        if is_full and self._limit is None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead of killing us
            self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limit[1]))
        elif not is_full and self._limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)
            self._limit = None

    def _spoiled(self, batch: Batch) -> Batch:
        generator = torch.Generator().manual_seed(self._step)
        shape = batch.tokens.shape
        tokens = torch.randint(self._vocab_size, shape, generator=generator)
        labels = torch.randint(self._vocab_size, shape, generator=generator)
        return dataclasses.replace(batch, tokens=tokens, labels=labels)


class _Burst:
    """Multiplies the outliers of a linear's input, those above twice its root mean square, while a fault says so."""

    def __init__(self, injection: FaultInjection, name: str) -> None:
        self._injection, self._name = injection, name

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not module.training:
            return None
        for fault in self._injection.now("activation_burst"):
            if fault.units_among([self._name]):
                inputs = (_with_outliers(inputs[0], fault.factor), *inputs[1:])
        return inputs


def _with_outliers(x: Tensor, factor: float) -> Tensor:
    bound = 2 * x.detach().float().square().mean().sqrt()
    return torch.where(x.abs() > bound, x * factor, x)
