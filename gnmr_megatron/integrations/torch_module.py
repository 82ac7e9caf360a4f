"""Control in a training loop of plain PyTorch, with or without FSDP2: five lines.

    from gnmr_megatron import ControlConfig
    from gnmr_megatron.integrations.torch_module import attach
    from gnmr_megatron.precision.config import PrecisionConfig

    control = attach(model, ControlConfig(), PrecisionConfig(low="saved_int4", recovery="saved_int8"))
    ...
    loss.backward()
    control.step()  # before clipping; the decision is in force from the next forward on

Units are the linears in numbered blocks of the model (`layers.3.mlp.up`), and their layer is that number.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.integrations.control_loop import ControlLoop
from gnmr_megatron.integrations.gradient_norms import gradient_norms
from gnmr_megatron.integrations.module_paths import UnitSwitches, refuse_misfits
from gnmr_megatron.integrations.run_record import MeasuredStep, RunRecord
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.plan import paths_of_units


class ModuleControl:
    """Control over the linears of a model; made by `attach`.

    Important:
        Call `step` once per optimizer step, after the last backward pass and before clipping.

    Attributes:
        units: what is controlled.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        linears: Sequence[torch.nn.Linear],
        loop: ControlLoop,
        units: UnitTable,
        *,
        paths: UnitSwitches | None,
        record: RunRecord | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.units = units
        self._model, self._linears, self._loop = model, linears, loop
        self._paths, self._record, self._group = paths, record, group
        self._switch()

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far."""
        return self._loop.step

    @property
    def measured(self) -> MeasuredStep | None:
        """Norms and decision of the last step; None before the first."""
        return self._loop.measured

    @property
    def recovered(self) -> list[str]:
        """Units on the recovery path in the coming step."""
        return self._loop.recovered

    def step(
        self,
        *,
        loss: float = math.nan,
        learning_rate: float = math.nan,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Decision:
        """Measure the gradients, decide, and put the units on their paths for the next step.

        Args:
            loss: training loss, for the run folder.
            learning_rate: for the run folder.
            scaler: whose scale the gradients still carry; leave it out after `scaler.unscale_(optimizer)`.
        """
        measured = self.decide(scaler=scaler)
        self.write(loss=loss, learning_rate=learning_rate)
        return measured.decision

    def decide(self, *, scaler: torch.amp.GradScaler | None = None) -> MeasuredStep:
        """`step` without writing to the run folder, for hosts that know the loss only later."""
        norms, global_norm = gradient_norms(
            self._model.parameters(),
            [linear.weight for linear in self._linears],
            scale=1.0 if scaler is None else scaler.get_scale(),
            group=self._group,
        )
        measured = self._loop.take(norms, global_norm, updated=math.isfinite(global_norm))
        self._switch()
        return measured

    def write(self, *, loss: float = math.nan, learning_rate: float = math.nan) -> None:
        """Write the last step to the run folder, where there is one."""
        if self._record is not None and self._loop.measured is not None:
            self._record.write(self._loop.measured, loss=loss, learning_rate=learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """All that resumes, in plain values; equal on all ranks."""
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            CheckpointError: the state is of other units or settings.
        """
        self._loop.load_state_dict(state)
        self._switch()

    def start_at(self, step: int) -> None:
        """Count from a step of a run that was trained without control so far."""
        self._loop.step = step
        self._switch()

    def expect_steps(self, total_steps: int) -> None:
        """Tell the run folder the last step of the run, before the first is taken."""
        if self._record is not None:
            self._record.total_steps = total_steps

    def close(self) -> None:
        """Write the end of the run to its folder, where there is one."""
        if self._record is not None:
            self._record.close(self._loop.step)

    def _switch(self) -> None:
        if self._paths is not None:
            self._paths.start_step(self._loop.step + 1, self._loop.recovered)


def attach(
    model: torch.nn.Module,
    config: ControlConfig | None = None,
    precision: PrecisionConfig | None = None,
    *,
    units: str = "*",
    folder: str | Path | None = None,
    total_steps: int = 0,
    group: dist.ProcessGroup | None = None,
    host: str = "PyTorch",
) -> ModuleControl:
    """Give the linears of a model two paths each, and a controller that chooses between them once a step.

    Before or after DDP, `fully_shard` or an optimizer take the model: parameters stay what they are.

    Args:
        model: any model; its units are the trainable `torch.nn.Linear` whose names hold a number.
        config: settings of the controller.
        precision: the two paths of each unit; None leaves the linears alone, in mode `monitor`.
        units: glob on the names of the units; others count as the rest of the model.
        folder: run folder to write, on the first rank.
        total_steps: last step of the run, for the folder; 0 where that is not known.
        group: ranks that hold the model together, where some gradients are DTensors; None for all.
        host: name of the trainer, for the folder.

    Raises:
        ConfigError: the model cannot do what is asked; the message says what to do.
    """
    config = config or ControlConfig()
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            "FullyShardedDataParallel (FSDP 1) flattens the weights of units; use torch.distributed.fsdp.fully_shard"
        )
    linears = _linears(model, units)
    found = [_unit(place, name, linear) for place, (name, linear) in enumerate(linears.items())]
    chosen = None
    if precision is not None:
        chosen = dict(zip(linears, paths_of_units(found, precision), strict=True))
        refuse_misfits(found, list(chosen.values()), precision)
        found = [unit for unit in found if not chosen[unit.id].is_fixed]
    elif config.mode == "active":
        raise ConfigError(
            "gnmr.mode: active needs the two paths, PrecisionConfig(low=..., recovery=...); monitor works without"
        )
    table = UnitTable(found)
    loop, switches = ControlLoop(config, table), None
    if precision is not None and chosen is not None:  # nothing is refused from here on
        switches = UnitSwitches(linears, chosen, precision, next(model.parameters()).device)
    record = None
    if folder is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        record = RunRecord(
            Path(folder),
            config,
            table,
            host=host,
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            total_steps=total_steps,
        )
    return ModuleControl(
        model,
        [linears[name] for name in table.ids],
        loop,
        table,
        paths=switches,
        record=record,
        group=group,
    )


def _linears(model: torch.nn.Module, units: str) -> dict[str, torch.nn.Linear]:
    """Trainable linears in numbered blocks, in the order in which the model holds them."""
    blocks = {
        name.removeprefix("module."): module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module.weight.requires_grad
        and any(part.isdigit() for part in name.split("."))
    }
    found = {name: module for name, module in blocks.items() if fnmatch.fnmatchcase(name, units)}
    if not found:
        raise ConfigError(
            f"units: no trainable torch.nn.Linear in a numbered block of the model has a name like '{units}'; "
            f"there are {', '.join(list(blocks)[:8]) or 'none'}"
        )
    return found


def _unit(place: int, name: str, linear: torch.nn.Linear) -> Unit:
    layer = next(int(part) for part in name.split(".") if part.isdigit())
    return Unit(layer, place, name, (linear.out_features, linear.in_features))
