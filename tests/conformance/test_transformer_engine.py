"""What the adapter relies on in Transformer Engine and in megatron-core's modules around it."""

import dataclasses
import itertools
import types
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.errors import ConfigError, EngineError
from gnmr_megatron.models import te_adapter
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.llama import build_chunks, transformer_config
from gnmr_megatron.models.precision_plan import plan_units
from gnmr_megatron.models.switchboard import Switchboard, recoverable_units
from gnmr_megatron.precision.config import PrecisionConfig

MODEL = LlamaConfig(
    num_layers=8, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2
)
OPENED = {
    "te_bf16": None,
    "te_fp8_tensorwise": "Float8CurrentScaling",
    "te_fp8_blockwise": "Float8BlockScaling",
    "te_mxfp8": "MXFP8BlockScaling",
    "te_nvfp4": "NVFP4BlockScaling",
}


def engine_of(plans, *, layout=None, **options):
    fields = {
        **(layout or ParallelLayout()).engine_fields(),
        **engine_compat.device_fields("cpu"),
        **te_adapter.engine_fields(plans),
        "use_cpu_initialization": False,
        "init_model_with_meta_device": True,
    }
    return transformer_config(MODEL, fields, options)


def build(plans, **options):
    engine = engine_of(plans, **options)
    meta = torch.device("meta")
    return engine, build_chunks(
        MODEL, engine, vocab_size=128, sequence_length=64, seed=1, device=meta, uses_te=True
    )


def linears_of(plans, chunks):
    return local_linears(chunks, {plan.unit.id for plan in plans})


@contextmanager
def recorded_kernels(monkeypatch):
    """Replace the modules' kernels by a note of the autocast that is open when they are called."""
    notes = []

    def note(module, x, **_):
        is_on = FP8GlobalStateManager.is_fp8_enabled()
        notes.append(type(FP8GlobalStateManager.get_fp8_recipe()).__name__ if is_on else None)
        return x, None

    with monkeypatch.context() as patch:
        for kind in (te.Linear, te.LayerNormLinear):
            patch.setattr(kind, "forward", note)
        yield notes


def opened(engine, module, monkeypatch):
    """Recipe under which a module's forward runs inside the engine's context for its layer; None for BF16."""
    context = get_fp4_context if engine.fp4 else get_fp8_context
    with recorded_kernels(monkeypatch) as notes, context(engine, 0):
        module(torch.empty(4, 2, 64, device="meta"))
    return notes[0]


def test_every_projection_of_the_engines_spec_is_a_unit():
    plans = plan_units(MODEL, PrecisionConfig(low="te_fp8_tensorwise", recovery="te_bf16"))
    _, chunks = build(plans)
    linears = linears_of(plans, chunks)
    assert sorted(linears) == sorted(plan.unit.id for plan in plans)
    for plan in plans:
        module = linears[plan.unit.id]
        assert tuple(module.weight.shape) == plan.unit.shape
        expected = {
            "linear_qkv": "TELayerNormColumnParallelLinear",
            "linear_proj": "TERowParallelLinear",
            "linear_fc1": "TELayerNormColumnParallelLinear",
            "linear_fc2": "TERowParallelLinear",
        }
        assert type(module).__name__ == expected[plan.unit.operator]


LOW_AND_RECOVERY = [
    ("te_fp8_tensorwise", "te_bf16"),
    ("te_fp8_blockwise", "te_bf16"),
    ("te_mxfp8", "te_bf16"),
    ("te_nvfp4", "te_bf16"),
    ("te_fp8_tensorwise", "te_fp8_blockwise"),
    ("te_nvfp4", "te_mxfp8"),
    ("te_bf16", "te_fp8_tensorwise"),
]


@pytest.fixture
def any_recipe(monkeypatch):
    """Without its check of the GPU's generation: no kernel runs here."""
    monkeypatch.setattr(quantization, "check_recipe_support", lambda _: None)
    for name in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        monkeypatch.setattr(FP8GlobalStateManager, f"is_{name}_available", lambda: (True, ""))


@pytest.mark.parametrize(("low", "recovery"), LOW_AND_RECOVERY)
def test_each_unit_opens_the_autocast_of_its_path(low, recovery, any_recipe, monkeypatch):
    plans = plan_units(MODEL, PrecisionConfig(low=low, recovery=recovery))
    units = recoverable_units(plans)
    engine, chunks = build(plans)
    linears = linears_of(plans, chunks)
    board = Switchboard(plans, te_adapter.te_switches(plans, linears))

    def all_opened():
        return {name: opened(engine, module, monkeypatch) for name, module in linears.items()}

    board.start_step(1)
    assert set(all_opened().values()) == {OPENED[low]}
    board.request(np.array([5, 10]))
    assert set(all_opened().values()) == {OPENED[low]}  # asked for in mid-step
    board.start_step(2)
    recovered = {name for name, recipe in all_opened().items() if recipe == OPENED[recovery]}
    assert recovered == {units[5].id, units[10].id}
    with board.evaluating(on_recovery=True):
        assert set(all_opened().values()) == {OPENED[recovery]}
        linears[units[0].id].eval()  # evaluation runs in the recipe of training
        assert opened(engine, linears[units[0].id], monkeypatch) == OPENED[recovery]
    board.request(np.array([], dtype=np.int64))
    board.start_step(3)
    assert set(all_opened().values()) == {OPENED[low]}


def test_a_switch_drops_the_cached_weight_and_nothing_else_does():
    plans = plan_units(MODEL, PrecisionConfig(low="te_fp8_tensorwise", recovery="te_bf16"))
    units = recoverable_units(plans)
    _, chunks = build(plans)
    linears = linears_of(plans, chunks)
    board = Switchboard(plans, te_adapter.te_switches(plans, linears))
    board.start_step(1)
    for module in linears.values():
        module._fp8_workspaces["weight"] = object()

    def with_cache():
        return {name for name, module in linears.items() if module._fp8_workspaces}

    board.start_step(2)
    assert with_cache() == set(units.ids)
    board.request(np.array([3]))
    board.start_step(3)
    assert with_cache() == set(units.ids) - {units[3].id}


RECIPE = """
configs:
  exact: {fixed: te_bf16}
  block: {transformer_engine_config_type: TEQuantizationParams,
          training_recipe: {fp8_quantization_recipe: blockwise}}
  both: {low: te_fp8_tensorwise, recovery: te_bf16}
matchers:
  ends: {type: glob, pattern: "decoder.layers.[07].*", config: exact, enabled: true}
  third: {type: glob, pattern: "decoder.layers.3.mlp.*", config: block, enabled: true}
  rest: {type: glob, pattern: "*", config: both, enabled: true}
"""


def test_a_recipe_file_gives_every_layout_the_same_map(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    precision = PrecisionConfig(
        low="te_fp8_tensorwise", recovery="te_bf16", recipe=str(tmp_path / "recipe.yaml")
    )
    plans = plan_units(MODEL, precision)
    maps = {}
    for stages, chunks_each in ((1, None), (2, None), (4, None), (2, 2)):
        layout = ParallelLayout(
            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks_each
        )
        found = {}
        for rank in range(stages):
            with pipeline(monkeypatch, stages, rank, chunks_each):
                engine, chunks = build(plans, layout=layout)
                linears = linears_of(plans, chunks)
                switches = te_adapter.te_switches(plans, linears)
                Switchboard(plans, switches)
                found |= {n: opened(engine, m, monkeypatch) for n, m in linears.items()}
        maps[stages, chunks_each] = found
    one = maps.pop((1, None))
    assert one == {
        plan.unit.id: None
        if plan.unit.layer in (0, 7)
        else "Float8BlockScaling"
        if plan.unit.layer == 3 and ".mlp." in plan.unit.id
        else "Float8CurrentScaling"
        for plan in plans
    }
    for layout, found in maps.items():
        assert found == one, layout


@contextmanager
def pipeline(monkeypatch, stages, rank, chunks_each):
    """Let the engine believe that this process is one stage of many."""
    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", stages)
        patch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)
        patch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", chunks_each)
        group = types.SimpleNamespace(rank=lambda: rank, size=lambda: stages)
        patch.setattr(parallel_state, "_PIPELINE_MODEL_PARALLEL_GROUP", group)
        yield


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8_param": True}, "fp8_param (fp4_param) keeps weights in FP8"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap has buffers for one precision only"),
        ({"first_last_layers_bf16": True}, "is what precision.first_last_k does"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
            "recompute_modules mlp would run again outside the FP8 context",
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, None),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            None,
        ),
        ({}, None),
    ],
)
def test_what_ignores_a_switch_is_refused(options, message):
    plans = plan_units(MODEL, PrecisionConfig(low="te_fp8_tensorwise", recovery="te_bf16"))
    try:
        problems = list(te_adapter.refusals(engine_of(plans, **options)))
    except ConfigError as error:  # the engine itself was first
        problems = [str(error)]
    if message is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert problems[0].startswith("parallel.engine_options: ")
        assert message in problems[0]


def test_delayed_scaling_is_refused():
    plans = plan_units(MODEL, PrecisionConfig(low="te_fp8_tensorwise", recovery="te_bf16"))
    engine = dataclasses.replace(engine_of(plans), fp8_recipe="delayed")
    assert "fp8_recipe delayed has a history for all modules" in next(te_adapter.refusals(engine))


def test_what_the_machine_cannot_run_is_refused(monkeypatch):
    def check(low, recovery="te_bf16"):
        te_adapter.check_environment(plan_units(MODEL, PrecisionConfig(low=low, recovery=recovery)))

    check("te_fp8_tensorwise")
    check("te_fp8_blockwise")
    for low in ("te_mxfp8", "te_nvfp4"):
        with pytest.raises(ConfigError, match=f"{low} has no kernels for compute capability 9.0"):
            check(low)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    check("te_nvfp4", "te_mxfp8")
    with pytest.raises(
        ConfigError, match=r"te_fp8_blockwise has no kernels for compute capability 10\.0"
    ):
        check("te_fp8_blockwise")
    monkeypatch.setattr(te_adapter, "version", lambda _: "2.12.0")
    with pytest.raises(
        EngineError, match=r"Transformer Engine 2.12.0 is installed, but .* below 2.12"
    ):
        check("te_fp8_tensorwise")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="te_fp8_tensorwise needs a GPU, and there is none"):
        check("te_fp8_tensorwise")


def test_recipes_of_two_paths_are_of_different_classes():
    """The engine rebuilds quantizers only when the class changes; a switch within one would be ignored."""
    names = [name for name in OPENED.values() if name is not None]
    for first, second in itertools.combinations(names, 2):
        assert first != second


@pytest.mark.parametrize(
    "recipe", ["{fp8_quantization_recipe: tensorwise, fp8_fromat: hybrid}", "{}, more: 1"]
)
def test_a_payload_that_the_engine_refuses_is_a_message(tmp_path, recipe):
    (tmp_path / "recipe.yaml").write_text(
        "configs: {a: {transformer_engine_config_type: TEQuantizationParams, training_recipe: "
        + recipe
        + "}}\nmatchers: {m: {type: glob, pattern: '*fc1', config: a, enabled: true}}"
    )
    precision = PrecisionConfig(
        low="te_fp8_tensorwise", recovery="te_bf16", recipe=str(tmp_path / "recipe.yaml")
    )
    with pytest.raises(
        ConfigError, match=r"megatron-core refuses the config of decoder\.layers\.0"
    ):
        te_adapter.check_environment(plan_units(MODEL, precision))
