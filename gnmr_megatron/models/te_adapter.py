"""Everything that touches Transformer Engine: which modules, which recipe a path is, the switch, the refusals.

megatron-core 0.16's Transformer Engine linears read `te_quant_params` at every forward and open an autocast from it,
so setting it between steps is the switch. The engine's own FP8 mode stays on all the time and a unit is recovered by
the override: then the engine's contexts, its recompute and its reset of cached FP8 weights all follow that mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig
from megatron.core.transformer import ModuleSpec, TransformerConfig
from packaging.version import Version

from gnmr_megatron.errors import ConfigError, EngineError
from gnmr_megatron.models.precision_plan import UnitPlan
from gnmr_megatron.precision.catalog import PATHS, PathName

TESTED = ("2.9", "2.12")
"""From the first version, and below the second: those that megatron-core 0.16.1 pairs with."""

# forward E4M3 and gradients E5M2 where a tensor has one scale; E4M3 throughout where scales are fine
RECIPES: dict[PathName, dict[str, str]] = {
    "te_bf16": {},
    "te_fp8_tensorwise": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
    "te_fp8_blockwise": {"fp8_quantization_recipe": "blockwise", "fp8_format": "e4m3"},
    "te_mxfp8": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "e4m3"},
    "te_nvfp4": {"fp4_quantization_recipe": "nvfp4"},
}
# compute capabilities whose kernels there are: from the first, below the second
CAPABILITIES: dict[PathName, tuple[tuple[int, int], tuple[int, int]]] = {
    "te_fp8_tensorwise": ((8, 9), (99, 0)),
    "te_fp8_blockwise": ((9, 0), (10, 0)),
    "te_mxfp8": ((10, 0), (99, 0)),
    "te_nvfp4": ((10, 0), (99, 0)),
}


def check_environment(plans: Sequence[UnitPlan]) -> None:
    """Refuse what this machine cannot run, before process groups start.

    Raises:
        ConfigError: there is no GPU, or one without kernels for a path.
        EngineError: Transformer Engine is missing or of another version.
    """
    paths: dict[PathName, str] = {}  # and the first unit of each
    for plan in plans:
        for path in plan.paths:
            paths.setdefault(path, plan.unit.id)
    name, unit = next(iter(paths.items()))
    if not torch.cuda.is_available():
        others = [path for path, info in PATHS.items() if info.family not in ("te", "frozen")]
        raise ConfigError(
            f"precision: {name} needs a GPU, and there is none (unit {unit}); possible here: {', '.join(others)}"
        )
    try:
        installed = Version(version("transformer-engine"))
    except PackageNotFoundError as error:
        raise EngineError(
            f"precision: {name} needs Transformer Engine (unit {unit}): pip install 'gnmr-megatron[te]'"
        ) from error
    if not Version(TESTED[0]) <= installed < Version(TESTED[1]):
        raise EngineError(
            f"Transformer Engine {installed} is installed, but megatron-core 0.16.1 pairs with {TESTED[0]} and newer, "
            f"below {TESTED[1]}: pip install 'gnmr-megatron[te]'"
        )
    for plan in plans:
        _quant_params(plan.low, plan)  # a payload may be malformed
    capability = torch.cuda.get_device_capability()
    possible = [path for path in RECIPES if _has_kernels(path, capability)]
    for path, unit_id in paths.items():
        if path not in possible:
            raise ConfigError(
                f"precision: {path} has no kernels for compute capability {capability[0]}.{capability[1]} "
                f"(unit {unit_id}); possible here: {', '.join(possible)}"
            )


def _has_kernels(path: PathName, capability: tuple[int, int]) -> bool:
    least, below = CAPABILITIES.get(path, ((0, 0), (99, 0)))
    return least <= capability < below


def engine_fields(plans: Sequence[UnitPlan]) -> dict[str, Any]:
    """Fields of `TransformerConfig` that turn on the mode which overrides then change for single units."""
    path = next((p for plan in plans for p in plan.paths if RECIPES[p]), None)
    if path is None:
        return {}
    recipe = RECIPES[path]
    if "fp4_quantization_recipe" in recipe:
        return {"fp4": "e2m1", "fp4_recipe": recipe["fp4_quantization_recipe"]}
    return {"fp8": recipe["fp8_format"], "fp8_recipe": recipe["fp8_quantization_recipe"]}


def refusals(engine: TransformerConfig) -> Iterator[str]:
    """One line for each setting of the engine under which switching a unit would be wrong or ignored."""
    key = "parallel.engine_options"
    if engine.fp8_param or engine.fp4_param:
        yield (
            f"{key}: fp8_param (fp4_param) keeps weights in FP8, so a recovered unit would multiply rounded "
            "weights; set it to false"
        )
    if engine.fp8_recipe == "delayed" and engine.fp8:
        yield (
            f"{key}: fp8_recipe delayed has a history for all modules and cannot be set for one; leave it out, "
            "precision.low chooses the recipe"
        )
    if engine.tp_comm_overlap:
        yield (
            f"{key}: tp_comm_overlap has buffers for one precision only, and the first recovered unit would crash; "
            "set it to false"
        )
    if engine.first_last_layers_bf16:
        yield (
            f"{key}: first_last_layers_bf16 is what precision.first_last_k does, for units as well; use that"
        )
    replayed = set(engine.recompute_modules or ()) - {"core_attn"}
    if engine.recompute_granularity == "selective" and replayed:
        yield (
            f"{key}: recompute_modules {', '.join(sorted(replayed))} would run again outside the FP8 context; use "
            "train.recompute: core_attn or full"
        )


def layer_spec() -> ModuleSpec:
    """One LLaMA layer of Transformer Engine's modules; norms are fused into linear_qkv and linear_fc1."""
    return get_gpt_layer_with_transformer_engine_spec()


class TESwitch:
    """Switch of one of megatron-core's Transformer Engine linears.

    Args:
        module: the linear.
        plan: its paths.
    """

    def __init__(self, module: torch.nn.Module, plan: UnitPlan) -> None:
        self._module: Any = module
        self._params = {path: _quant_params(path, plan) for path in plan.paths}
        self._path: PathName | None = None

    def select(self, path: PathName) -> None:
        """See `PathSwitch`."""
        if path == self._path:
            return
        self._path = path
        self._module.te_quant_params = self._params[path]
        # the weight that was quantised for the other path: stale after the next update, and memory besides
        self._module._fp8_workspaces.clear()

    def start_step(self, seed: Callable[[], int]) -> None:
        """Nothing: Transformer Engine rounds by its own rules."""

    def take_non_finite(self) -> int:
        """Nothing to tell: kernels do not count."""
        return 0


def te_switches(
    plans: Sequence[UnitPlan], linears: Mapping[str, torch.nn.Module]
) -> dict[str, TESwitch]:
    """Switches of Transformer Engine linears by global name."""
    # meant as a hint that scales start anew; here that is wanted, at every switch
    warnings.filterwarnings("ignore", message="Recipe type changed", module="transformer_engine")
    by_id = {plan.unit.id: plan for plan in plans}
    return {name: TESwitch(module, by_id[name]) for name, module in linears.items()}


def _quant_params(path: PathName, plan: UnitPlan) -> Any:
    """The engine's object for a path; always an override, so that the switch does not depend on its mode."""
    from megatron.core.extensions.transformer_engine import TEQuantizationParams

    payload = plan.engine or {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": {
            **RECIPES[path],
            "override_quantized_autocast": True,
            "override_nonquantized_autocast": True,
        },
    }
    context = MatchContext(plan.unit.id, plan.unit.layer)
    try:
        return TEQuantizationParams.parse_from_config(
            QuantizationConfig(dict(payload), context, config_key=path)
        )
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"precision.recipe: megatron-core refuses the config of {plan.unit.id}: {error or dict(payload)}"
        ) from error
