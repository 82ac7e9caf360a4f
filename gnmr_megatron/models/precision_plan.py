"""Which paths each projection of the model can run on, by global id; no torch, so that it is checked first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gnmr_megatron.control.units import Unit
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.lora_config import LORA_FAMILIES, LoraConfig
from gnmr_megatron.precision.catalog import PATHS, PathName, kept_bytes_per_token, misfits
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.plan import (
    paths_of_units,
    refuse_globs_without_units,
    refuse_if_all_are_fixed,
)

PROJECTIONS = {
    "linear_qkv": "self_attention",
    "linear_proj": "self_attention",
    "linear_fc1": "mlp",
    "linear_fc2": "mlp",
}
"""Projections of a layer in the order of the forward pass, and the module that holds each."""

NO_LORA = LoraConfig()

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Projections that hold a part of each token; the others hold a part of their outputs."""


@dataclass(frozen=True)
class AdapterPlan:
    """What is trained of a projection whose weight is frozen.

    Attributes:
        rank: of its adapter; 0 where it has none, so nothing is trained.
        exact: path that keeps inputs in the type of the model, in which adapters are computed.
    """

    rank: int
    exact: PathName


@dataclass(frozen=True)
class UnitPlan:
    """One projection and its paths.

    Attributes:
        unit: id, place and whole shape.
        low: path outside the recovery set.
        recovery: path inside it.
        is_fixed: the unit always runs on `low` (which is `recovery`, too) and is no unit of the controller.
        adapter: what is trained in place of the weight, or None where the weight itself is.
        engine: payload in megatron-core's form for a fixed unit.
    """

    unit: Unit
    low: PathName
    recovery: PathName
    is_fixed: bool = False
    adapter: AdapterPlan | None = None
    engine: Mapping[str, Any] | None = None

    @property
    def paths(self) -> tuple[PathName, ...]:
        """The paths it can run on."""
        return (self.low,) if self.is_fixed else (self.low, self.recovery)

    def held(self, tensor_parallel: int) -> tuple[int, int]:
        """[out, in] of the weight on one of so many tensor-parallel ranks."""
        rows, columns = self.unit.shape
        if self.unit.operator in ROW_PARALLEL:
            return rows, columns // tensor_parallel
        return rows // tensor_parallel, columns

    def kept_bytes(
        self,
        path: PathName,
        precision: PrecisionConfig,
        *,
        tensor_parallel: int,
        sequence_parallel: bool,
    ) -> float:
        """Bytes kept for the weight gradient of a token, over the ranks that share the unit.

        Without scales that all tokens share. Without sequence parallelism, each rank of a column-parallel linear
        keeps the whole token. A frozen weight needs nothing, but its adapter does: the input of A, packed where the
        path packs, and that of B.
        """
        if self.adapter is not None:
            if not self.adapter.rank:
                return 0.0
            path = path if PATHS[path].family == "saved" else self.adapter.exact
        per_rank = kept_bytes_per_token(
            path,
            self.held(tensor_parallel)[1],
            granularity=precision.granularity,
            group_size=precision.group_size,
        )
        is_row = self.unit.operator in ROW_PARALLEL
        times = 1 if sequence_parallel and not is_row else tensor_parallel
        return per_rank * times + self._inner_bytes(
            1 if sequence_parallel and is_row else tensor_parallel
        )

    def _inner_bytes(self, times: int) -> float:
        """What so many ranks keep of what A gives to B: a row-parallel linear with sequence parallelism scatters it."""
        if self.adapter is None:
            return 0.0
        return self.adapter.rank * PATHS[self.adapter.exact].bits / 8 * times


def uses_te(plans: Sequence[UnitPlan]) -> bool:
    """Whether the model is made of Transformer Engine's modules; then all paths are its own."""
    return PATHS[plans[0].low].family == "te"


def model_units(model: LlamaConfig) -> list[Unit]:
    """All projections of the model, in order."""
    heads, groups, head = model.num_attention_heads, model.query_groups, model.head_size
    shapes = {
        "linear_qkv": ((heads + 2 * groups) * head, model.hidden_size),
        "linear_proj": (model.hidden_size, heads * head),
        "linear_fc1": (2 * model.ffn_hidden_size, model.hidden_size),  # gate and up
        "linear_fc2": (model.hidden_size, model.ffn_hidden_size),
    }
    return [
        Unit(layer, position, f"decoder.layers.{layer}.{parent}.{name}", shapes[name])
        for layer in range(model.num_layers)
        for position, (name, parent) in enumerate(PROJECTIONS.items())
    ]


def plan_units(
    model: LlamaConfig, precision: PrecisionConfig, lora: LoraConfig = NO_LORA
) -> list[UnitPlan]:
    """The paths of every projection of a LLaMA; see `plan_paths`.

    With adapters, units that get none are fixed on their low path.
    """
    plans = plan_paths(model_units(model), precision)
    if not lora.is_on:
        return plans
    globs = [(f"lora.units[{index}]", glob) for index, glob in enumerate(lora.units)]
    refuse_globs_without_units(globs, [plan.unit.id for plan in plans])
    exact: PathName = "fp32" if model.dtype == "fp32" else "bf16"
    plans = [
        replace(plan, adapter=AdapterPlan(lora.rank, exact))
        if lora.adapts(plan.unit.id)
        else replace(plan, recovery=plan.low, is_fixed=True, adapter=AdapterPlan(0, exact))
        for plan in plans
    ]
    refuse_if_all_are_fixed(plan.is_fixed for plan in plans)
    return plans


def plan_paths(units: Sequence[Unit], precision: PrecisionConfig) -> list[UnitPlan]:
    """The paths of every unit: the first override that matches its id, or the paths of the settings.

    With adapters, projections without one are fixed on their low path: nothing there is trained.

    Raises:
        ConfigError: a glob matches no unit, `first_last_k` is too large, or no unit is left to control.
    """
    return [
        UnitPlan(unit, paths.low, paths.recovery, is_fixed=paths.is_fixed, engine=paths.engine)
        for unit, paths in zip(units, paths_of_units(units, precision), strict=True)
    ]


def plan_problems(
    plans: list[UnitPlan],
    precision: PrecisionConfig,
    *,
    tensor_parallel: int,
    tokens: int,
) -> Iterator[str]:
    """One line for each path or key that does not fit a unit, naming the first such unit.

    Args:
        plans: of all projections.
        precision: settings of the paths.
        tensor_parallel: ranks that share each weight.
        tokens: rows of a microbatch, over all ranks that share the sequence.
    """
    families = {PATHS[path].family == "te" for plan in plans for path in plan.paths}
    if len(families) > 1:
        te = next(p for p in plans for path in p.paths if PATHS[path].family == "te")
        other = next(p for p in plans for path in p.paths if PATHS[path].family != "te")
        yield (
            f"precision: {te.unit.id} runs on {_first(te, is_te=True)} and {other.unit.id} on "
            f"{_first(other, is_te=False)}, but all paths have to be te_*, or none; te_bf16 is their BF16"
        )
    seen = set()
    common_width = math.gcd(*(plan.held(tensor_parallel)[1] for plan in plans))
    for plan in plans:
        for path in plan.paths:
            for problem in misfits(
                path,
                granularity=precision.granularity,
                group_size=precision.group_size,
                held=plan.held(tensor_parallel),
                common_width=common_width,
                tokens=tokens,
            ):
                about = problem.split()[0]  # the key or the path
                if about not in seen:
                    seen.add(about)
                    yield f"{problem} (unit {plan.unit.id})"


def lora_problems(plans: list[UnitPlan], lora: LoraConfig) -> Iterator[str]:
    """One line for each path that does not go with frozen weights, or that needs them, naming the first such unit."""
    seen = set()
    for plan in plans:
        for path in plan.paths:
            family = PATHS[path].family
            if path in seen or (family in LORA_FAMILIES if lora.is_on else family != "frozen"):
                continue
            seen.add(path)
            yield (
                f"lora.rank: units with frozen weights do not run on {path} (unit {plan.unit.id}); possible: "
                f"{', '.join(name for name, info in PATHS.items() if info.family in LORA_FAMILIES)}"
                if lora.is_on
                else f"precision: {path} is for frozen weights (unit {plan.unit.id}); set lora.rank and lora.base"
            )


def _first(plan: UnitPlan, *, is_te: bool) -> PathName:
    return next(path for path in plan.paths if (PATHS[path].family == "te") == is_te)
