"""Paths whose GEMMs are low precision, against products of values rounded one block after the other in NumPy."""

import numpy as np
import pytest
import torch

from gnmr_megatron.precision.catalog import PATHS, kept_bytes_per_token
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.linear import linear
from gnmr_megatron.precision.quantizer import Quantizer
from gnmr_megatron.precision.registry import FORMATS, precision_path
from tests.references import number_formats

TOKENS, WIDTH, OUT = 160, 288, 208  # no multiples of 128: tiles and blocks are ragged
OURS = [name for name, info in PATHS.items() if info.family not in ("te", "frozen")]


def operands(dtype=torch.float32, tokens=TOKENS, width=WIDTH):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens // 2, 2, width, generator=generator)
    x[:, :, 3] *= 30  # a feature of outliers
    weight = 0.05 * torch.randn(OUT, width, generator=generator)
    grad_output = 1e-3 * torch.randn(tokens // 2, 2, OUT, generator=generator)
    x, weight, grad_output = (t.to(dtype) for t in (x, weight, grad_output))
    return x.requires_grad_(), weight.requires_grad_(), grad_output


def gemms(path, x, weight, grad_output, quantizer=None):
    output = linear(x, weight, path, quantizer=quantizer)
    return output, *torch.autograd.grad(output, [x, weight], grad_output)


def rounded(x, name, rows, columns, scale="fp32"):
    """Blocks of a matrix rounded to a format, one after the other, in float64."""
    out = np.zeros(x.shape)
    rows, columns = rows or x.shape[0], columns or x.shape[1]
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].astype(np.float32)
            amax = np.abs(block).max()
            step = amax / np.float32(FORMATS[name].max)
            if scale == "bf16":
                step = np.float32(torch.tensor(step).bfloat16().item())
            if scale == "e8m0":
                step = np.float32(
                    2.0 ** (np.floor(np.log2(amax)) - np.floor(np.log2(FORMATS[name].max)))
                )
            codes = number_formats.nearest(name, (block / step).astype(np.float64))
            out[i : i + rows, j : j + columns] = codes.astype(np.float32) * step
    return out


# path, settings: format of inputs and weights, of gradients; block of activations, of weights; type of scales
CASES = {
    "deepseek_fp8": ({}, "fp8_e4m3", "fp8_e4m3", (1, 128), (128, 128), "fp32"),
    "deepseek_fp6": ({}, "fp6_e3m2", "fp6_e3m2", (1, 128), (128, 128), "fp32"),
    "fp8_hybrid": ({"granularity": "tensor"}, "fp8_e4m3", "fp8_e5m2", (None, None), (None, None), "fp32"),
    "fp6_e2m3": ({"granularity": "mx"}, "fp6_e2m3", "fp6_e2m3", (1, 32), (1, 32), "e8m0"),
    "fp4_e2m1": ({"group_size": 16}, "fp4_e2m1", "fp4_e2m1", (1, 16), (1, 16), "bf16"),
    "int8": ({"granularity": "block", "group_size": 32}, "int8", "int8", (1, 32), (32, 32), "fp32"),
    "int4": ({"group_size": 32}, "int4", "int4", (1, 32), (1, 32), "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_all_three_gemms_multiply_rounded_operands(name):
    fields, forward, backward, tile, block, scale = CASES[name]
    x, weight, grad_output = operands()
    ours = gemms(precision_path(name, PrecisionConfig(**fields)), x, weight, grad_output)
    x, g = x.detach().view(TOKENS, WIDTH).numpy(), grad_output.view(TOKENS, OUT).numpy()
    w = weight.detach().numpy()

    kept = rounded(x, forward, *tile, scale)
    again = kept if tile == (None, None) else rounded(kept, forward, *tile[::-1], scale)
    expected = (
        kept @ rounded(w, forward, *block, scale).T,
        rounded(g, backward, *tile, scale) @ rounded(w, forward, *block[::-1], scale),
        rounded(g, backward, *tile[::-1], scale).T @ again,
    )
    for result, reference in zip(ours, expected, strict=True):
        result = result.detach().reshape(reference.shape).double().numpy()
        assert np.abs(result - reference).max() <= 2e-6 * np.abs(reference).max()
    exact = x @ w.T
    assert np.abs(expected[0] - exact).max() > 1e-3 * np.abs(exact).max()  # rounding is felt


@pytest.mark.parametrize(
    ("name", "granularity"), [("torch_fp8_tensorwise", "tensor"), ("torch_fp8_rowwise", "token")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_fp8_gemms_equal_the_emulated_ones(name, granularity, dtype):
    """But for the order of summation, and the rounding of the result."""
    data = operands(dtype)
    real = gemms(precision_path(name, PrecisionConfig()), *data)
    emulated = gemms(precision_path("fp8_e4m3", PrecisionConfig(granularity=granularity)), *data)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-8
    for ours, reference in zip(real, emulated, strict=True):
        assert ours.dtype == dtype
        assert (ours - reference).abs().max() <= tolerance * reference.abs().max()


def kept_bytes(path, x, weight):
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        linear(x, weight, path)
    kept.pop(weight.untyped_storage().data_ptr())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", OURS)
def test_what_a_linear_keeps_is_what_the_table_says_and_near_the_limit_of_the_format(name):
    x, weight, _ = operands(torch.bfloat16, tokens=512, width=1024)
    measured = kept_bytes(precision_path(name, PrecisionConfig()), x, weight) / 512
    table = kept_bytes_per_token(name, 1024, granularity="group", group_size=128)
    if name == "torch_fp8_rowwise":
        table += 1024 * 4 / 512  # an FP32 scale a channel, shared by the tokens
    if name == "torch_fp8_tensorwise":
        table += 4 / 512
    assert measured == table
    # scales are at most a BF16 number for 128 values, or two FP32 ones
    assert measured <= 1024 * PATHS[name].bits / 8 + 1024 / 128 * 4 + 8


@pytest.mark.parametrize("granularity", ["tensor", "token", "block", "mx"])
def test_the_table_holds_for_each_granularity(granularity):
    x, weight, _ = operands(torch.bfloat16, tokens=512, width=1024)
    settings = PrecisionConfig(granularity=granularity)
    measured = kept_bytes(precision_path("fp8_e4m3", settings), x, weight)
    shared = {"tensor": 4, "token": 4 * 1024}.get(granularity, 0)
    table = kept_bytes_per_token("fp8_e4m3", 1024, granularity=granularity, group_size=128)
    assert measured == table * 512 + shared


@pytest.mark.parametrize("name", [name for name in OURS if PATHS[name].family != "exact"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_the_weight_gradient_and_is_counted(name, bad):
    x, weight, grad_output = operands()
    path, quantizer = precision_path(name, PrecisionConfig(group_size=32)), Quantizer()
    gemms(path, x, weight, grad_output, quantizer)
    assert quantizer.take_non_finite() == 0
    with torch.no_grad():
        x[7, 1, 11] = bad
    *_, grad_weight = gemms(path, x, weight, grad_output, quantizer)
    assert not grad_weight.isfinite().all()
    assert quantizer.take_non_finite() >= 1
    assert quantizer.take_non_finite() == 0


@pytest.mark.parametrize("name", ["saved_int4", "fp6_e3m2", "deepseek_fp8"])
def test_stochastic_rounding_is_a_function_of_step_and_pass(name):
    path = precision_path(name, PrecisionConfig(group_size=32, rounding="stochastic"))
    data, quantizer = operands(), Quantizer()

    def step(seed, *, recompute=False):
        quantizer.start_step(lambda: seed)
        results = []
        for _ in range(2):  # microbatches
            if recompute:  # the forward runs once before, without keeping anything
                with torch.no_grad():
                    early = linear(data[0], data[1], path, quantizer=quantizer)
            results += gemms(path, *data, quantizer)
            assert not recompute or torch.equal(early, results[-3])
        return results

    before = torch.get_rng_state()
    first, again, other, recomputed = step(1), step(1), step(2), step(1, recompute=True)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, recomputed))
    assert not torch.equal(first[2], other[2])
    assert not torch.equal(first[2], first[5])  # microbatches draw noise of their own
    assert torch.equal(torch.get_rng_state(), before)
