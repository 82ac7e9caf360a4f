"""Rounding and codes against tables built from the specifications, and against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnmr_megatron.precision.formats import FloatFormat, decode, encode, round_to
from gnmr_megatron.precision.registry import FORMATS
from tests.references import number_formats

FLOATS = [name for name, item in FORMATS.items() if isinstance(item, FloatFormat)]
ORACLES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "int4": ml_dtypes.int4,
    "int2": ml_dtypes.int2,
}


def all_codes(name):
    table = number_formats.finite_values(name)
    codes = np.array(list(table), dtype=np.int64).astype(np.uint8).view(np.int8)
    return torch.from_numpy(codes), torch.tensor(list(table.values()), dtype=torch.float32)


def critical_points(name):
    """All values and midpoints of the format, with their FP32 neighbours, and what lies beyond."""
    values = number_formats.magnitudes(name)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1:] * [1.01, 2, 1e30]])
    points = points.astype(np.float32)
    near = [np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf)]
    points = np.concatenate([points, *near])
    return np.concatenate([points, -points])


@pytest.mark.parametrize("name", FORMATS)
def test_every_finite_code_round_trips(name):
    codes, values = all_codes(name)
    decoded = decode(codes, FORMATS[name])
    assert torch.equal(decoded, values)
    assert name.startswith("int") or torch.equal(decoded.signbit(), values.signbit())  # -0.0
    assert torch.equal(encode(values, FORMATS[name]).to(torch.int8), codes)
    assert torch.equal(round_to(values, FORMATS[name]), values)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_equals_the_table_of_all_midpoints(name):
    points = critical_points(name)
    ours = round_to(torch.from_numpy(points), FORMATS[name]).numpy()
    np.testing.assert_array_equal(ours, number_formats.nearest(name, points.astype(np.float64)))


@pytest.mark.parametrize("name", ORACLES)
@given(data=st.data())
def test_rounding_equals_ml_dtypes(name, data):
    largest = FORMATS[name].max  # beyond it, ml_dtypes does not saturate
    x = data.draw(st.floats(-largest, largest, width=32))
    ours = round_to(torch.tensor([x]), FORMATS[name]).item()
    source = (
        np.rint(np.float32(x)) if name.startswith("int") else np.float32(x)
    )  # its cast truncates
    assert ours == float(source.astype(ORACLES[name]).astype(np.float32))
    assert name.startswith("int") or np.signbit(ours) == np.signbit(x)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_visible(name):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rounded = round_to(x, FORMATS[name])
    assert rounded[0].isnan()
    if name == "fp8_e5m2":  # the only one with infinities
        assert rounded[1:].tolist() == [torch.inf, -torch.inf]
    else:
        assert rounded[1:].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_takes_a_neighbour_and_has_the_value_as_its_mean(name):
    table = number_formats.magnitudes(name)
    below, above = (float(value) for value in table[(len(table) - 1) // 2 :][:2])
    x = torch.full((40_000,), -(below + 0.3 * (above - below)))
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(7))
    rounded = round_to(x, FORMATS[name], noise)
    assert set(rounded.tolist()) == {-below, -above}
    share_below = (rounded == -below).double().mean().item()
    assert abs(share_below - 0.7) < 4 * (0.3 * 0.7 / len(x)) ** 0.5


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_leaves_values_of_the_format_as_they_are(name):
    _, values = all_codes(name)
    for noise in (torch.zeros_like(values), torch.full_like(values, 1 - 2**-24)):
        assert torch.equal(round_to(values, FORMATS[name], noise), values)
