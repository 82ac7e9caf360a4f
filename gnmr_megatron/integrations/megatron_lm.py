"""Control in Megatron-LM's own training loop.

In `megatron/training/training.py`, function `setup_model_and_optimizer`, after `get_megatron_optimizer` and before
`load_checkpoint`:

    from gnmr_megatron import ControlConfig
    from gnmr_megatron.integrations.megatron_lm import attach

    attach(model, optimizer, ControlConfig(mode="monitor"))

From then on `optimizer.step()` decides, and Megatron-LM's checkpoints carry the state of control with that of the
optimizer. For `active` mode the linears need two paths: start with `--spec gnmr_megatron.integrations.megatron_lm
LAYER_SPEC`, or with Transformer Engine's layers, and give `precision`, too.

megatron.training is never imported: this works on what megatron-core gives, in any loop written like Megatron-LM's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.consensus import (
    RiskConsensus,
    UnitNorms,
    risk_consensus,
    verify_decision,
)
from gnmr_megatron.distributed.process_groups import gather_from_all
from gnmr_megatron.errors import ConfigError, EngineError
from gnmr_megatron.integrations.control_loop import ControlLoop
from gnmr_megatron.integrations.run_record import RunRecord
from gnmr_megatron.models import te_adapter
from gnmr_megatron.models.discovery import local_linears, local_units, unwrap
from gnmr_megatron.models.layer_spec import llama_layer_spec
from gnmr_megatron.models.precision_plan import UnitPlan, plan_paths, plan_problems, uses_te
from gnmr_megatron.models.recoverable_linear import RecoverableColumnLinear, RecoverableRowLinear
from gnmr_megatron.models.switchboard import Switchboard, recoverable_units
from gnmr_megatron.models.switches import path_switches
from gnmr_megatron.precision.config import PrecisionConfig

LAYER_SPEC = llama_layer_spec()
"""A LLaMA layer whose linears hold two paths, for `--spec` of pretrain_gpt.py."""

STATE_KEY = "gnmr"
"""Where the optimizer's state holds that of control."""


class MegatronControl:
    """Control over a model of megatron-core, from its optimizer's steps; made by `attach`.

    Attributes:
        units: of the whole model.
        norms: gradient norms of the last step that was measured; None before the first.
    """

    def __init__(
        self,
        config: ControlConfig,
        units: UnitTable,
        *,
        consensus: RiskConsensus,
        switchboard: Switchboard | None,
        record: RunRecord | None,
    ) -> None:
        self.units = units
        self.norms: UnitNorms | None = None
        self._loop = ControlLoop(config, units)
        self._check_interval = config.check_interval
        self._consensus, self._switchboard, self._record = consensus, switchboard, record
        self._is_new = False
        self._switch()

    @property
    def decision(self) -> Decision | None:
        """The last decision; None before the first."""
        return None if self._loop.measured is None else self._loop.measured.decision

    @property
    def recovered(self) -> list[str]:
        """Units on the recovery path in the coming step."""
        return self._loop.recovered

    def global_norm(self) -> float:
        """Measure the gradients that are ready now; what the optimizer clips by."""
        self.norms, self._is_new = self._consensus.unit_norms(), True
        return self.norms.global_norm

    def after_step(self, *, updated: bool) -> None:
        """Decide over the step that the optimizer has just taken, or count one that it skipped unmeasured.

        Raises:
            ConsensusError: ranks decided otherwise; looked at every `check_interval` steps.
        """
        if self.norms is None or not self._is_new:
            self._loop.skip()
        else:
            self._is_new = False
            measured = self._loop.take(self.norms.per_unit, self.norms.global_norm, updated=updated)
            if self._record is not None:
                self._record.write(measured, loss=float("nan"), learning_rate=float("nan"))
            if self._check_interval and self._loop.step % self._check_interval == 0:
                verify_decision(measured.decision)
        self._switch()

    def state_dict(self) -> dict[str, Any]:
        """All that resumes, in plain values; equal on all ranks. Travels in the optimizer's state by itself."""
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            CheckpointError: the state is of other units or settings.
        """
        self._loop.load_state_dict(state)
        self._switch()

    def close(self) -> None:
        """Write the end of the run to its folder, if it has one."""
        if self._record is not None:
            self._record.close(self._loop.step)

    def _switch(self) -> None:
        if self._switchboard is not None:
            self._switchboard.request(self._loop.recovery_set)
            self._switchboard.start_step(self._loop.step + 1)


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    config: ControlConfig | None = None,
    *,
    precision: PrecisionConfig | None = None,
    folder: str | Path | None = None,
    total_steps: int = 0,
) -> MegatronControl:
    """Let control take the place of the optimizer's reduction of gradient norms; all ranks call it.

    The norm that `optimizer.step()` returns and clips by stays the same, and so does the number of collectives, but for
    the comparison of decisions every `config.check_interval` steps. Steps that a loss scaler skips are not measured, as
    megatron-core does not; the recovery set then stays.

    Args:
        model: the DDP-wrapped model chunks of this rank.
        optimizer: of `get_megatron_optimizer`.
        config: settings of the controller.
        precision: the two paths of each unit, for linears that can switch; None for mode `monitor` on any model.
        folder: run folder to write, on the first rank. Losses in it are NaN, since the optimizer does not know them.
        total_steps: last step of the run, for the folder; 0 where that is not known.

    Raises:
        ConfigError: the model cannot do what is asked; the message says what to do.
        EngineError: another version of megatron-core, or an optimizer whose norm cannot be measured so.
    """
    engine_compat.check_engine()
    config = config or ControlConfig()
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    problem = next(engine_compat.norm_problems(chunks, optimizer), None)
    gathered = gather_from_all((local_units(chunks), problem))
    for problem in (other for _, other in gathered if other is not None):
        raise EngineError(f"control cannot measure gradients here: {problem}")
    everyone = sorted({unit for found, _ in gathered for unit in found})
    if not everyone:
        raise ConfigError(
            "the model has no units: none of its modules is a decoder.layers.<i>.self_attention.linear_qkv, "
            ".linear_proj or .mlp.linear_fc1, .linear_fc2"
        )
    linears = local_linears(chunks, {unit.id for unit in everyone})
    device = next(chunks[0].parameters()).device
    switchboard, units = None, UnitTable(everyone)
    if precision is not None:
        plans = plan_paths(everyone, precision)
        misfits = gather_from_all(_misfits(plans, precision, linears, unwrap(chunks[0]).config))
        for misfit in filter(None, misfits):
            raise ConfigError(misfit)
        units = recoverable_units(plans)
        switchboard = Switchboard(plans, path_switches(precision, plans, linears, device))
    elif config.mode == "active":
        raise ConfigError(
            "gnmr.mode: active needs the two paths, precision=PrecisionConfig(low=..., recovery=...); "
            "monitor works without"
        )
    control = MegatronControl(
        config,
        units,
        consensus=risk_consensus(chunks, optimizer, units, linears, device),
        switchboard=switchboard,
        record=_record(folder, config, units, total_steps),
    )
    _take_over(optimizer, control)
    return control


def _take_over(optimizer: Any, control: MegatronControl) -> None:
    engine_step = optimizer.step

    def step() -> tuple[bool, float | None, int | None]:
        updated, grad_norm, num_zeros = engine_step()
        control.after_step(updated=bool(updated))
        return updated, grad_norm, num_zeros

    engine_compat.replace_norm(optimizer, control.global_norm)
    optimizer.step = step
    engine_compat.carry_state(
        optimizer,
        STATE_KEY,
        save=lambda: json.dumps(control.state_dict()),
        load=lambda text: control.load_state_dict(json.loads(text)),
    )


def _misfits(
    plans: Sequence[UnitPlan],
    precision: PrecisionConfig,
    linears: Mapping[str, torch.nn.Module],
    engine: Any,
) -> str:
    """Why this rank's linears cannot run on their paths; empty where they can."""
    is_te = uses_te(plans)
    for name, linear in linears.items():
        if not _can_switch(linear, is_te=is_te):
            need = (
                "Transformer Engine's layers (--transformer-impl transformer_engine)"
                if is_te
                else "`--spec gnmr_megatron.integrations.megatron_lm LAYER_SPEC`"
            )
            return (
                f"precision.low: {plans[0].low} cannot run on {name}, a {type(linear).__name__}; build the model with "
                f"{need}, or leave precision out and set gnmr.mode to monitor"
            )
    problems = list(
        plan_problems(
            list(plans), precision, tensor_parallel=engine.tensor_model_parallel_size, tokens=0
        )
    )
    if is_te and not problems:
        te_adapter.check_environment(plans)
        problems += te_adapter.refusals(engine)
        problems += [
            f"precision: {plans[0].low} needs the engine's {field} to be {value}, and it is {getattr(engine, field)}"
            for field, value in te_adapter.engine_fields(plans).items()
            if getattr(engine, field) != value
        ]
    return "\n".join(problems)


def _can_switch(linear: torch.nn.Module, *, is_te: bool) -> bool:
    if is_te:
        return hasattr(linear, "te_quant_params")
    return isinstance(linear, RecoverableColumnLinear | RecoverableRowLinear)


def _record(
    folder: str | Path | None, config: ControlConfig, units: UnitTable, total_steps: int
) -> RunRecord | None:
    if folder is None or dist.get_rank() != 0:
        return None
    return RunRecord(
        Path(folder),
        config,
        units,
        host="Megatron-LM",
        world_size=dist.get_world_size(),
        num_parameters=None,
        total_steps=total_steps,
    )
