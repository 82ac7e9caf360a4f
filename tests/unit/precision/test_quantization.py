from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.precision.catalog import columns_that_share_bytes
from gnmr_megatron.precision.formats import E2M1, E3M2, E4M3, INT2, INT3, INT4, INT8
from gnmr_megatron.precision.quantization import (
    PackedTensor,
    Quantization,
    pack,
    round_blocks,
    unpack,
)
from gnmr_megatron.precision.registry import FORMATS
from tests.references import number_formats
from tests.references.quantization_reference import round_trip

BLOCKS = {"tensor": (None, None), "token": (1, None), "group": (1, 8)}


def granular(number_format, granularity, columns=8, **fields):
    rows, whole = BLOCKS[granularity]
    return Quantization(number_format, rows, whole and columns, **fields)


def back(x, how, noise=None):
    return unpack(pack(x, how, noise), x.dtype)


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("granularity", BLOCKS)
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
    how = granular(FORMATS[name], granularity)
    expected = round_trip(x, largest=FORMATS[name].max, granularity=granularity, group_size=8)
    np.testing.assert_array_equal(back(torch.from_numpy(x), how).numpy(), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "how",
    [
        {"rows": None, "columns": None, "scale": "fp32"},
        {"rows": 1, "columns": 128, "scale": "fp32"},
        {"rows": 128, "columns": 1, "scale": "fp32"},
        {"rows": 128, "columns": 128, "scale": "fp32"},
        {"rows": 1, "columns": 32, "scale": "e8m0"},
    ],
    ids=["tensor", "tile", "tile along tokens", "block", "mx"],
)
def test_every_block_is_rounded_by_its_own_scale(name, how):
    """Against the midpoint table, one block after the other, ragged edges included."""
    number_format = FORMATS[name]
    x = torch.randn(200, 328, generator=torch.Generator().manual_seed(1))
    how = Quantization(number_format, **how)
    values, scales = round_blocks(x, how)
    height, width = how.rows or 200, how.columns or 328
    for row, column in ((0, 0), (199, 327), (130, 129)):
        i, j = row // height, column // width
        block = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        amax = np.abs(x[block].numpy()).max()
        if how.scale == "e8m0":
            scale = np.float32(
                2.0 ** (np.floor(np.log2(amax)) - np.floor(np.log2(number_format.max)))
            )
        else:
            scale = amax / np.float32(number_format.max)
        assert (scales.float() == scale).any()
        codes = number_formats.nearest(name, (x[block].numpy() / scale).astype(np.float64))
        np.testing.assert_array_equal(values[block].numpy(), codes.astype(np.float32) * scale)
    if how.rows in (1, None):
        assert torch.equal(unpack(pack(x, how)), values)
    else:
        with pytest.raises(ValueError, match="rows share a scale"):
            pack(x, how)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_fill_whole_bytes(name):
    """All codes in one row, in and out of their bytes."""
    _, values = zip(*number_formats.finite_values(name).items(), strict=True)
    bits = FORMATS[name].bits
    shared = columns_that_share_bytes(bits)
    row = torch.tensor([*values, *[0.0] * (-len(values) % shared)])[None]
    packed = pack(row, Quantization(FORMATS[name], 1, None))  # the largest value makes the scale 1
    assert packed.codes.numel() * 8 == row.numel() * bits
    assert torch.equal(unpack(packed), row)


def test_int4_puts_two_codes_in_a_byte():
    x = torch.tensor([[-7.0, 1.0, 3.0, 7.0]])
    packed = pack(x, granular(INT4, "token"))
    # columns 0 and 2, then 1 and 3: low nibble first
    assert packed.codes.view(torch.uint8).tolist() == [[(3 << 4) | (-7 & 15), (7 << 4) | 1]]
    assert packed.scales.tolist() == [[1.0]]


def test_int3_puts_eight_codes_in_a_word_of_three_bytes():
    x = torch.tensor([[-3.0, 1.0, 3.0, 0.0, 2.0, -2.0, -1.0, 3.0]])
    packed = pack(x, granular(INT3, "token"))
    word = sum((int(value) & 7) << (3 * column) for column, value in enumerate(x[0]))
    assert packed.codes.view(torch.uint8).tolist() == [list(word.to_bytes(3, "little"))]


@pytest.mark.parametrize(
    ("name", "limit"), [("int8", 0.52), ("int4", 0.27), ("int3", 0.2), ("int2", 0.14)]
)
def test_packed_bytes_stay_within_the_limit_of_bf16(name, limit):
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    packed = pack(x, granular(FORMATS[name], "group", 128))
    assert packed.num_bytes <= limit * x.nbytes


@pytest.mark.parametrize("number_format", [INT4, INT8, E2M1, E3M2, E4M3], ids=lambda f: f.name)
@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
@pytest.mark.parametrize("scale", ["bf16", "fp32", "e8m0"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_stays_visible(number_format, granularity, scale, bad):
    x = torch.full((2, 8), float(number_format.max))  # the scale is exactly 1
    x[1, 3] = bad
    how = granular(number_format, granularity, 4, scale=scale)
    for result in (back(x, how), round_blocks(x, how)[0]):
        assert not torch.isfinite(result[1, 3])
        if granularity != "tensor":
            assert torch.equal(result[0], x[0])


def test_a_stale_scale_loses_small_values_or_saturates_large_ones():
    x = torch.tensor([[1.0, 2.0, -7.0, 7.0]])  # the scale of INT4 is 1
    how = granular(INT4, "tensor", scale="fp32")
    for staleness, expected in (
        (16.0, [0, 0, 0, 0]),
        (2.0, [0, 2, -8, 8]),
        (0.25, [1, 1.75, -1.75, 1.75]),
    ):
        stale = replace(how, staleness=staleness)
        assert back(x, stale).tolist() == [expected]
        assert round_blocks(x, stale)[0].tolist() == [expected]


def test_stochastic_rounding_has_the_value_as_its_mean():
    x = torch.full((20_000, 2), 0.3)
    x[:, 1] = 7.0  # the scale is 1, so 0.3 becomes 0 or 1
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    result = back(x, granular(INT4, "token", rounding="stochastic"), noise)[:, 0]
    assert set(result.tolist()) == {0.0, 1.0}
    # three standard deviations of a mean of 20,000 draws with p = 0.3
    assert abs(result.mean().item() - 0.3) < 3 * (0.3 * 0.7 / 20_000) ** 0.5


@pytest.mark.parametrize(
    ("number_format", "width", "message"),
    [
        (INT4, 5, "int4: groups of 5 columns must be multiples of 2"),
        (INT3, 12, "int3: groups of 12 columns must be multiples of 8"),
        (INT2, 6, "int2: groups of 6 columns must be multiples of 4"),
        (E3M2, 6, "fp6_e3m2: groups of 6 columns must be multiples of 4"),
    ],
)
def test_a_width_that_does_not_fill_bytes_is_refused(number_format, width, message):
    with pytest.raises(ValueError, match=message):
        pack(torch.ones(1, width), granular(number_format, "token"))


def test_gathered_parts_of_two_ranks_are_worth_their_own_values():
    how = granular(INT4, "tensor")
    parts = [torch.randn(3, 8), 100 * torch.randn(3, 8)]
    packed = [pack(part, how) for part in parts]
    both = PackedTensor(
        torch.cat([p.codes for p in packed]), torch.cat([p.scales for p in packed]), how, 8
    )
    assert torch.equal(unpack(both), torch.cat([back(part, how) for part in parts]))
