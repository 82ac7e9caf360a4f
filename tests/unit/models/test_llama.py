"""The model in one process; its layouts are in tests/distributed."""

import dataclasses
import sys
import types
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.process_groups import start_process_groups, stop_process_groups
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.llama import build_chunks, engine_option_problems, transformer_config
from gnmr_megatron.models.precision_plan import plan_units
from gnmr_megatron.models.switchboard import Switchboard, linear_switches, recoverable_units
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.registry import precision_path

VOCAB, LENGTH = 50, 12
CONFIG = LlamaConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, dtype="fp32",
    vocab_padding_multiple=64,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    start_process_groups(ParallelLayout(), seed=1, timeout=timedelta(seconds=30))
    yield
    stop_process_groups()


def build(config=CONFIG, seed=1):
    device = torch.device("cpu")
    engine = transformer_config(
        config, {**ParallelLayout().engine_fields(), **engine_compat.device_fields("cpu")}
    )
    (model,) = build_chunks(
        config, engine, vocab_size=VOCAB, sequence_length=LENGTH, seed=seed, device=device
    )
    return model


def run(model, tokens, labels=None):
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    return model(tokens, positions, None, labels=labels)


def reference_logits(weights, tokens):
    """LLaMA in plain torch from Megatron's weights, for one sequence."""
    heads, groups, size = CONFIG.num_attention_heads, CONFIG.query_groups, CONFIG.head_size
    x = weights["embedding.word_embeddings.weight"][tokens]
    frequencies = 10_000 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(len(tokens)), frequencies).repeat(1, 2)

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def rotate(x):  # [sequence, heads, size]
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * angles.cos()[:, None] + half * angles.sin()[:, None]

    for layer in range(CONFIG.num_layers):
        w = {key.removeprefix(f"decoder.layers.{layer}."): value for key, value in weights.items()}
        h = norm(x, w["input_layernorm.weight"])
        qkv = (h @ w["self_attention.linear_qkv.weight"].T).view(
            len(tokens), groups, heads // groups + 2, size
        )
        q = rotate(qkv[:, :, : heads // groups].reshape(len(tokens), heads, size))
        k = rotate(qkv[:, :, -2]).repeat_interleave(heads // groups, 1)
        v = qkv[:, :, -1].repeat_interleave(heads // groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        scores = scores.masked_fill(
            torch.ones(len(tokens), len(tokens)).triu(1).bool(), float("-inf")
        )
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(tokens), -1)
        x = x + attended @ w["self_attention.linear_proj.weight"].T
        gate, up = (norm(x, w["pre_mlp_layernorm.weight"]) @ w["mlp.linear_fc1.weight"].T).chunk(
            2, -1
        )
        x = x + (F.silu(gate) * up) @ w["mlp.linear_fc2.weight"].T
    return norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T


def test_logits_are_those_of_llama():
    model = build()
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # larger than at the start, so that every part has a say
            parameter.mul_(3).add_(0.05 * torch.randn_like(parameter))
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = run(model, tokens)[0, :, :VOCAB]
        theirs = reference_logits(dict(model.named_parameters()), tokens[0])[:, :VOCAB]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_padded_vocabulary_takes_no_part_in_the_loss():
    model = build()
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    labels = torch.randint(0, VOCAB, (2, LENGTH))
    losses = run(model, tokens, labels)
    logits = run(model, tokens)[..., :VOCAB]
    torch.testing.assert_close(
        losses, F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    )
    losses.sum().backward()
    assert model.output_layer.weight.shape[0] == 64
    assert not model.output_layer.weight.grad[VOCAB:].any()
    assert model.output_layer.weight.grad[:VOCAB].any()


def test_initial_weights_depend_on_name_and_seed_alone():
    first, again, other = (dict(build(seed=seed).named_parameters()) for seed in (1, 1, 2))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if weight.dim() == 2:
            assert not torch.equal(weight, other[name])
    deviation = {name: weight.std().item() for name, weight in first.items() if weight.dim() == 2}
    assert deviation["decoder.layers.0.mlp.linear_fc1.weight"] == pytest.approx(0.02, rel=0.1)
    assert deviation["decoder.layers.0.mlp.linear_fc2.weight"] == pytest.approx(
        0.02 / 2, rel=0.1
    )  # sqrt(2 * 2 layers)


@pytest.mark.parametrize("tied", [False, True])
def test_the_number_of_parameters_is_that_of_the_model(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    assert config.num_parameters(VOCAB) == sum(
        parameter.numel() for parameter in build(config).parameters()
    )


def test_every_projection_is_a_unit_in_the_order_of_the_forward_pass():
    plans = plan_units(CONFIG, PrecisionConfig())
    units = recoverable_units(plans)
    linears = local_linears([build()], units.ids)
    assert {name: tuple(linear.weight.shape) for name, linear in linears.items()} == {
        unit.id: unit.shape for unit in units
    }
    assert [(unit.layer, unit.operator, unit.shape) for unit in units][:4] == [
        (0, "linear_qkv", (64, 32)),
        (0, "linear_proj", (32, 32)),
        (0, "linear_fc1", (128, 32)),
        (0, "linear_fc2", (32, 64)),
    ]
    assert units[5].id == "decoder.layers.1.self_attention.linear_proj"
    assert len(units) == 8


def switchboard(model, rounding="nearest"):
    settings = PrecisionConfig(group_size=16, rounding=rounding)
    plans = plan_units(CONFIG, settings)
    units = recoverable_units(plans)
    paths = {name: precision_path(name, settings) for name in ("saved_int4", "saved_int8")}
    switches = linear_switches(plans, local_linears([model], units.ids), paths)
    return Switchboard(plans, switches), units


def gradients(model):
    model.zero_grad()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCAB
    run(model, tokens, tokens).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_recovered_unit_alone_changes_its_weight_gradient():
    model = build()
    board, units = switchboard(model)
    low = gradients(model)
    board.start_step(1)
    board.request(np.array([5]))
    assert all(torch.equal(low[name], grad) for name, grad in gradients(model).items())  # not yet
    board.start_step(2)
    recovered = gradients(model)
    changed = {name for name in low if not torch.equal(low[name], recovered[name])}
    assert changed == {units[5].id + ".weight"}
    board.request(np.array([], dtype=np.int64))
    board.start_step(3)
    back = gradients(model)
    assert all(torch.equal(low[name], back[name]) for name in low)
    assert f"unit={units[5].id}, path=saved_int4" in repr(model)


def test_stochastic_rounding_repeats_with_the_step_and_changes_with_it():
    model = build()
    board, _ = switchboard(model, rounding="stochastic")
    results = []
    for step in (1, 1, 2):
        board.start_step(step)
        results.append(gradients(model)["decoder.layers.0.mlp.linear_fc1.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, r"model\.num_layers: 0 must be at least 1"),
        (
            {"hidden_size": 100},
            r"model\.hidden_size: 100 must be an even multiple of model\.num_attention_heads",
        ),
        (
            {"num_query_groups": 3},
            r"model\.num_query_groups: 3 must divide model\.num_attention_heads \(8\)",
        ),
        (
            {"rope_scaling_factor": 2.0},
            r"model\.rope_scaling_factor: 2\.0 has no effect without model\.rope_scaling",
        ),
        (
            {"rope_scaling": "linear", "rope_scaling_factor": 0.5},
            r"model\.rope_scaling_factor: 0\.5 must be at least 1",
        ),
        (
            {"rope_scaling": "llama3", "rope_low_freq_factor": 4.0},
            r"model\.rope_low_freq_factor: 4\.0 must be positive and below model\.rope_high_freq_factor",
        ),
        ({"init_std": 0.0}, r"model\.init_std and model\.norm_epsilon must be positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_their_keys(fields, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(**fields)


@pytest.mark.parametrize(
    ("name", "uses_te", "message"),
    [
        ("num_moe_experts", True, "has no effect on a LLaMA of these modules"),
        ("cuda_graph_impl", True, "CUDA graphs replay the kernels of one path"),
        ("fp8_param", False, "is for Transformer Engine's modules"),
        ("tp_comm_overlap_ag", False, "is for Transformer Engine's modules"),
        ("fp8_margin", True, None),
        ("attention_softmax_in_fp32", False, None),
    ],
)
def test_engine_options_without_effect_are_refused(name, uses_te, message):
    problems = list(engine_option_problems({name: 1}, uses_te=uses_te))
    assert len(problems) == (message is not None)
    for problem in problems:
        assert problem.startswith(f"parallel.engine_options: {name}")
        assert message in problem


def test_an_evaluation_leaves_paths_and_noise_of_the_step_as_they_were():
    model = build()
    board, units = switchboard(model, rounding="stochastic")
    board.request(np.array([2]))
    board.start_step(1)
    before = gradients(model)
    for on_recovery, path in ((True, "saved_int8"), (False, "saved_int4")):
        with board.evaluating(on_recovery=on_recovery):
            assert repr(model).count(f"path={path}") == len(units)
            first = gradients(model)
        with board.evaluating(on_recovery=on_recovery):
            assert all(map(torch.equal, first.values(), gradients(model).values()))
    assert repr(model).count("path=saved_int8") == 1
    board.start_step(1)
    assert all(map(torch.equal, before.values(), gradients(model).values()))


@pytest.mark.parametrize("path", ["bf16", "saved_int4", "deepseek_fp8"])
def test_a_fused_kernel_adds_the_weight_gradient_to_its_buffer(path, monkeypatch):
    """A stand-in for apex's kernel, called as megatron-core calls it."""
    calls = []

    def accumulate(operand, grad_output, main_grad):
        calls.append(operand.shape)
        main_grad.add_(grad_output.float().t() @ operand.float())

    kernels = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", kernels)
    module = build().decoder.layers[0].mlp.linear_fc2
    module.path = precision_path(path, PrecisionConfig(group_size=16))
    weight = module.weight.detach().bfloat16().requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    weight.grad_added_to_main_grad = False
    x = torch.randn(6, 2, 64).bfloat16()
    output = module._forward_impl(
        x,
        weight,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=None,
        gradient_accumulation_fusion=True,
    )
    output.sum().backward()
    assert weight.grad_added_to_main_grad == (path != "deepseek_fp8")  # its GEMM is not exact
    assert calls == ([] if path == "deepseek_fp8" else [(12, 64)])
    if path == "bf16":
        expected = 1 + x.float().sum(dim=(0, 1)).expand(32, 64)
        torch.testing.assert_close(weight.main_grad, expected)
