import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.precision.formats import INT4, INT8
from gnmr_megatron.precision.packed import Quantization, dequantize, quantize
from tests.references.quantization_reference import round_trip

FORMATS = {"int8": INT8, "int4": INT4}


def back(x, how, generator=None):
    return dequantize(quantize(x, how, generator), x.shape, x.dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 5),
    groups=st.integers(1, 4),
    exponent=st.integers(-30, 30),
)
@settings(max_examples=40, deadline=None)
def test_values_equal_the_slow_reference(name, granularity, seed, tokens, groups, exponent):
    x = np.random.default_rng(seed).normal(size=(tokens, groups * 8)).astype(
        np.float32
    ) * np.float32(2.0**exponent)
    x[0, :8] = 0  # a group of zeros
    how = Quantization(FORMATS[name], granularity, group_size=8, rounding="nearest")
    expected = round_trip(x, largest=FORMATS[name].max, granularity=granularity, group_size=8)
    np.testing.assert_array_equal(back(torch.from_numpy(x), how).numpy(), expected)


def test_int4_puts_two_codes_in_a_byte():
    x = torch.tensor([[-7.0, 1.0, 3.0, 7.0]])
    packed = quantize(x, Quantization(INT4, "token", 128, "nearest"))
    # columns 0 and 2, then 1 and 3: low nibble first
    assert packed.codes.view(torch.uint8).tolist() == [[(3 << 4) | (-7 & 15), (7 << 4) | 1]]
    assert packed.scales.tolist() == [[1.0]]


@pytest.mark.parametrize("code", range(-7, 8))
def test_every_int4_code_survives(code):
    x = torch.tensor([[float(code), 7.0]])
    assert back(x, Quantization(INT4, "token", 2, "nearest")).tolist() == x.tolist()


def test_every_int8_code_survives():
    x = torch.arange(-127, 128, dtype=torch.float32).repeat_interleave(2)[None]
    assert torch.equal(back(x, Quantization(INT8, "token", 2, "nearest")), x)


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.52), ("int4", 0.27)])
def test_packed_bytes_stay_within_the_limit_of_bf16(name, limit):
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    packed = quantize(x, Quantization(FORMATS[name], "group", 128, "nearest"))
    assert packed.num_bytes <= limit * x.nbytes


@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_stays_visible(granularity, bad):
    x = torch.full((2, 8), 7.0)  # the scale is exactly 1
    x[1, 3] = bad
    result = back(x, Quantization(INT4, granularity, 4, "nearest"))
    assert not torch.isfinite(result[1, 3])
    if granularity != "tensor":
        assert torch.equal(result[0], x[0])


def test_stochastic_rounding_has_the_value_as_its_mean():
    x = torch.full((20_000, 2), 0.3)
    x[:, 1] = 7.0  # the scale is 1, so 0.3 becomes 0 or 1
    result = back(
        x, Quantization(INT4, "token", 2, "stochastic"), torch.Generator().manual_seed(1)
    )[:, 0]
    assert set(result.tolist()) == {0.0, 1.0}
    # three standard deviations of a mean of 20,000 draws with p = 0.3
    assert abs(result.mean().item() - 0.3) < 3 * (0.3 * 0.7 / 20_000) ** 0.5


def test_stochastic_rounding_repeats_with_its_seed_and_leaves_the_global_generator_alone():
    x, how = torch.randn(4, 8), Quantization(INT4, "group", 8, "stochastic")
    before = torch.get_rng_state()
    first, second, other = (back(x, how, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_width_that_groups_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="width 6 is no multiple of the group size 4"):
        quantize(torch.ones(1, 6), Quantization(INT8, "group", 4, "nearest"))


def test_an_odd_width_is_refused_for_int4():
    with pytest.raises(ValueError, match="width 5 must be even"):
        quantize(torch.ones(1, 5), Quantization(INT4, "token", 4, "nearest"))


def test_gathered_parts_of_two_ranks_are_worth_their_own_values():
    how = Quantization(INT4, "tensor", 4, "nearest")
    parts = [torch.randn(3, 8), 100 * torch.randn(3, 8)]
    packed = [quantize(part, how) for part in parts]
    both = type(packed[0])(
        torch.cat([p.codes for p in packed]), torch.cat([p.scales for p in packed]), INT4, 8
    )
    expected = torch.cat([back(part, how) for part in parts])
    assert torch.equal(dequantize(both, torch.Size([6, 8]), torch.float32), expected)
