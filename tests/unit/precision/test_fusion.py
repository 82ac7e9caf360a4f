"""Fused kernels give the bits of the functions that they were made of."""

import pytest
import torch

from gnmr_megatron.precision import fusion
from gnmr_megatron.precision.quantization import Quantization, pack, round_blocks, unpack
from gnmr_megatron.precision.registry import FORMATS


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setitem(fusion._settings, "is_enabled", False)
    if not fusion.use_fused_kernels(enabled=True, device=torch.device("cpu")):
        pytest.skip("no C++ compiler on this machine")


def results(x, how, noise):
    packed, (values, scales) = pack(x, how, noise), round_blocks(x, how, noise)
    return packed.codes, packed.scales.float(), unpack(packed, x.dtype), values, scales.float()


@pytest.mark.parametrize("name", ["fp6_e3m2", "int4", "int3"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_fused_kernels_give_the_same_bits(fused, name, rounding):
    how = Quantization(FORMATS[name], 1, 32, "e8m0" if name == "fp6_e3m2" else "bf16", rounding)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 64, generator=generator).bfloat16()
    x[0, :32], x[1, 3], x[2, 40] = 0, torch.inf, torch.nan
    noise = torch.rand(x.shape, generator=generator) if rounding == "stochastic" else None
    compiled = results(x, how, noise)
    more = results(torch.cat([x, x]), how, None if noise is None else torch.cat([noise, noise]))
    fusion.use_fused_kernels(enabled=False, device=torch.device("cpu"))
    plain = results(x, how, noise)
    finite = [tensor.isfinite() if tensor.is_floating_point() else None for tensor in plain]
    good_rows = torch.ones(len(x), dtype=torch.bool)
    good_rows[[1, 2]] = False  # codes mean nothing where the scale is not finite
    assert torch.equal(compiled[0][good_rows], plain[0][good_rows])
    for ours, twice, reference, is_finite in list(zip(compiled, more, plain, finite, strict=True))[
        1:
    ]:
        assert torch.equal(ours.isfinite(), is_finite)
        assert torch.equal(ours[is_finite], reference[is_finite])
        assert torch.equal(
            twice[: len(ours)][is_finite], reference[is_finite]
        )  # any number of rows
