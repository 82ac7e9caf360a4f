import pytest

from gnmr_megatron.errors import ConfigError
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.models.precision_plan import (
    lora_problems,
    model_units,
    plan_problems,
    plan_units,
)
from gnmr_megatron.precision.config import PrecisionConfig

MODEL = LlamaConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2
)


def paths_of(**precision):
    plans = plan_units(MODEL, PrecisionConfig(**precision))
    return {
        (plan.unit.layer, plan.unit.operator): (plan.low, plan.recovery, plan.is_fixed)
        for plan in plans
    }


def problems_of(tensor_parallel=1, tokens=64, model=MODEL, **precision):
    settings = PrecisionConfig(**precision)
    return list(
        plan_problems(
            plan_units(model, settings), settings, tensor_parallel=tensor_parallel, tokens=tokens
        )
    )


def test_without_overrides_every_unit_has_the_paths_of_the_settings():
    assert set(paths_of(low="bf16", recovery="fp32").values()) == {("bf16", "fp32", False)}
    assert len(paths_of()) == 16


def test_the_first_override_that_matches_wins():
    paths = paths_of(
        low="saved_int4",
        recovery="saved_int8",
        overrides=[
            {"units": "decoder.layers.1.*", "fixed": "bf16"},
            {"units": "*.mlp.*", "low": "saved_int8", "recovery": "bf16"},
            {"units": "*linear_fc2", "recovery": "fp32"},
        ],
    )
    assert paths[0, "linear_qkv"] == ("saved_int4", "saved_int8", False)
    assert paths[0, "linear_fc2"] == ("saved_int8", "bf16", False)
    assert paths[1, "linear_fc2"] == ("bf16", "bf16", True)


def test_layers_at_both_ends_are_fixed_unless_an_override_says_otherwise():
    paths = paths_of(
        low="saved_int4",
        recovery="bf16",
        first_last_k=1,
        overrides=[{"units": "decoder.layers.3.mlp.linear_fc1", "low": "saved_int8"}],
    )
    for layer, operator in paths:
        expected = ("bf16", "bf16", True) if layer in (0, 3) else ("saved_int4", "bf16", False)
        if (layer, operator) == (3, "linear_fc1"):
            expected = ("saved_int8", "bf16", False)
        assert paths[layer, operator] == expected


RECIPE = """
configs:
  eight: {low: saved_int8, recovery: bf16}
  exact: {fixed: bf16}
matchers:
  off: {type: glob, pattern: "*", config: exact, enabled: false}
  forgotten: {type: glob, pattern: "*", config: exact}
  first: {type: glob, pattern: "decoder.layers.0.*", config: exact, enabled: true}
  rest: {type: glob, pattern: "*", config: eight, enabled: true}
"""


def test_a_recipe_file_is_read_as_the_engine_reads_its_own(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    paths = paths_of(
        recipe=str(file), overrides=[{"units": "*.0.mlp.linear_fc1", "low": "saved_int4"}]
    )
    assert paths[0, "linear_qkv"] == ("bf16", "bf16", True)
    assert paths[0, "linear_fc1"] == ("saved_int4", "saved_int8", False)  # overrides come first
    assert paths[2, "linear_fc2"] == ("saved_int8", "bf16", False)
    # the engine's own matching of the same file, on the same names
    recipes = pytest.importorskip("megatron.core.quantization.quant_config")
    recipe = recipes.RecipeConfig.from_yaml_file(str(file))
    for unit in model_units(MODEL):
        key = recipe.match_to_config_key(recipes.MatchContext(unit.id, unit.layer))
        if (unit.layer, unit.operator) != (0, "linear_fc1"):
            assert paths[unit.layer, unit.operator][2] == (key == "exact")


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ("{training_recipe: {}}", "te_bf16"),
        ("{training_recipe: {fp8_quantization_recipe: tensorwise}}", "te_fp8_tensorwise"),
        ("{training_recipe: {fp8_quantization_recipe: blockwise}}", "te_fp8_blockwise"),
        ("{training_recipe: {fp4_quantization_recipe: nvfp4}}", "te_nvfp4"),
    ],
)
def test_the_engines_own_payloads_fix_a_unit(tmp_path, payload, path):
    payload = payload.replace("{", "{transformer_engine_config_type: TEQuantizationParams, ", 1)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"configs: {{a: {payload}}}\nmatchers: {{m: {{type: glob, pattern: '*fc1', config: a, enabled: true}}}}"
    )
    paths = paths_of(recipe=str(file), low="te_fp8_tensorwise", recovery="te_bf16")
    assert paths[0, "linear_fc1"] == (path, path, True)
    assert paths[0, "linear_fc2"] == ("te_fp8_tensorwise", "te_bf16", False)


MATCH_ALL = (
    "configs: {{a: {}}}\nmatchers: {{m: {{enabled: true, type: glob, pattern: '*', config: a}}}}"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "needs `configs:` and `matchers:`"),
        ("configs: {a: {low: bf16}}\nmatchers: {m: {enabled: true, type: regex}}", "type `regex`"),
        (
            "configs: {eight: {low: bf16}}\n"
            "matchers: {m: {enabled: true, type: glob, pattern: '*', config: eigth}}",
            "matcher `m`: no config `eigth`; did you mean `eight`",
        ),
        (
            "configs: {a: {low: bf17}}\nmatchers: {m: {enabled: true, type: glob, pattern: '*', config: a}}",
            "config `a`.low: no path `bf17`; did you mean `bf16`",
        ),
        (
            "configs: {a: {transformer_engine_config_type: TEQuantizationParams, "
            "training_recipe: {fp8_quantization_recipe: delayed}}}\n"
            "matchers: {m: {enabled: true, type: glob, pattern: '*', config: a}}",
            "recipe `delayed` cannot be set for one module",
        ),
        (MATCH_ALL.format("bf16"), "config `a`: must be `{low: PATH, recovery: PATH}`"),
        (MATCH_ALL.format("{low: bf16, units: '*fc1'}"), "config `a`: must be `{low: PATH"),
        (
            MATCH_ALL.format("{fixed: [bf16]}"),
            "config `a`.fixed: no path `['bf16']`; did you mean `bf16`?",
        ),
        (
            "configs: {1: {low: bf16}}\n"
            "matchers: {m: {enabled: true, type: glob, pattern: '*', config: [2]}}",
            "matcher `m`: no config `[2]`; possible: 1",
        ),
    ],
)
def test_a_recipe_that_is_wrong_is_refused_with_the_place(tmp_path, content, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        PrecisionConfig(recipe=str(file))
    assert message in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([{"unit": "*"}], "precision.overrides[0]: unknown key `unit`; did you mean `units`?"),
        ([{"low": "bf16"}], "precision.overrides[0]: needs `units`"),
        ([{"units": "*"}], "needs `low` or `recovery` or both, or `fixed` alone"),
        ([{"units": "*", "fixed": "bf16", "low": "bf16"}], "or `fixed` alone"),
        ([{"units": "*", "low": "fp8_e4m4"}], "no path `fp8_e4m4`; did you mean `fp8_e4m3`?"),
    ],
)
def test_an_override_that_is_wrong_is_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        PrecisionConfig(overrides=overrides)
    assert message in str(error.value)


def test_a_glob_that_matches_nothing_is_refused_with_the_nearest_ids():
    with pytest.raises(ConfigError) as error:
        paths_of(overrides=[{"units": "decoder.layers.9.mlp.linear_fc2", "fixed": "bf16"}])
    text = str(error.value)
    assert "'decoder.layers.9.mlp.linear_fc2' matches no unit; nearest: " in text
    assert "decoder.layers.3.mlp.linear_fc2" in text


def test_plans_that_leave_nothing_to_control_are_refused():
    with pytest.raises(ConfigError, match="none is left to control"):
        paths_of(first_last_k=2)
    with pytest.raises(ConfigError, match=r"first_last_k: 3 at either end are more"):
        paths_of(first_last_k=3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"low": "saved_int4", "group_size": 64},
            "precision.group_size: 64 does not divide 96, the width of the input on a rank, as saved_int4 needs; "
            "possible for all inputs: 2, 4, 8, 16, 32; or take another precision.granularity "
            "(unit decoder.layers.0.mlp.linear_fc2)",
        ),
        (
            {"low": "fp4_e2m1", "recovery": "bf16", "granularity": "tensor"},
            "fp4_e2m1 has 8 magnitudes and needs finer scales; set precision.granularity to token, group or mx "
            "(unit decoder.layers.0.self_attention.linear_qkv)",
        ),
        (
            {"low": "saved_int8", "recovery": "bf16", "granularity": "block", "group_size": 32},
            "saved_int8 knows precision.granularity tensor, token, group and mx, not block "
            "(unit decoder.layers.0.self_attention.linear_qkv)",
        ),
        (
            {"low": "torch_fp8_rowwise", "recovery": "bf16", "tokens": 24},
            "torch_fp8_rowwise multiplies sizes that are multiples of 16, but the microbatch in tokens on a rank is "
            "24; change the model's sizes or parallel.tensor_model_parallel_size, or take another path "
            "(unit decoder.layers.0.self_attention.linear_qkv)",
        ),
        (
            {"low": "te_fp8_tensorwise", "recovery": "bf16"},
            "precision: decoder.layers.0.self_attention.linear_qkv runs on te_fp8_tensorwise and "
            "decoder.layers.0.self_attention.linear_qkv on bf16, but all paths have to be te_*, or none; te_bf16 is "
            "their BF16",
        ),
        ({"low": "deepseek_fp6", "recovery": "deepseek_fp8"}, None),  # ragged tiles are exact
    ],
)
def test_paths_that_cannot_run_a_unit_are_refused_in_one_line(arguments, expected):
    problems = problems_of(**arguments)
    assert problems[:1] == ([] if expected is None else [expected])


def test_shards_have_to_fit_too():
    settings = {"low": "torch_fp8_rowwise", "recovery": "bf16"}
    assert problems_of(**settings) == []
    (problem, *_) = problems_of(tensor_parallel=4, **settings)
    assert "the input on a rank is 24" in problem  # 96 / 4


def test_with_adapters_other_units_are_fixed_on_their_low_path():
    precision = PrecisionConfig(low="frozen_int8", recovery="bf16")
    lora = LoraConfig(rank=4, units=["*.linear_qkv", "decoder.layers.0.mlp.*"])
    plans = plan_units(MODEL, precision, lora)
    controlled = {plan.unit.id for plan in plans if not plan.is_fixed}
    adapted = {plan.unit.id for plan in plans if lora.adapts(plan.unit.id)}
    assert controlled == adapted
    assert len(adapted) == MODEL.num_layers + 2
    assert {(plan.low, plan.recovery) for plan in plans if plan.is_fixed} == {
        ("frozen_int8", "frozen_int8")
    }
    assert list(lora_problems(plans, lora)) == []


def test_paths_and_frozen_weights_have_to_fit_each_other():
    lora = LoraConfig(rank=4)
    emulated = plan_units(MODEL, PrecisionConfig(low="fp8_e4m3", recovery="bf16"), lora)
    (problem,) = lora_problems(emulated, lora)
    assert "units with frozen weights do not run on fp8_e4m3" in problem
    frozen = plan_units(MODEL, PrecisionConfig(low="frozen_int8", recovery="bf16"))
    (problem,) = lora_problems(frozen, LoraConfig())
    assert "frozen_int8 is for frozen weights" in problem
    with pytest.raises(ConfigError, match=r"lora.units\[1\]: '\*.linear_fc3' matches no unit"):
        plan_units(MODEL, PrecisionConfig(), LoraConfig(rank=4, units=["*", "*.linear_fc3"]))
