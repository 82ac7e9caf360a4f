"""The risk vector in one process; many processes are in tests/distributed."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.consensus import RiskConsensus
from gnmr_megatron.distributed.ownership import OwnedGradient
from gnmr_megatron.errors import EngineError


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pieces(*slots_and_values):
    return [OwnedGradient(slot, torch.tensor(values)) for slot, values in slots_and_values]


def test_norms_are_roots_of_sums_of_squares_per_unit_and_over_all():
    owned = pieces((0, [3.0, 4.0]), (2, [1.0]), (0, [12.0]), (3, [2.0, 2.0, 1.0]))
    norms = RiskConsensus(owned, 3, torch.device("cpu")).unit_norms()
    np.testing.assert_allclose(norms.per_unit, [13.0, 0.0, 1.0], rtol=1e-12)
    assert norms.global_norm == pytest.approx((169 + 1 + 9) ** 0.5, rel=1e-12)


def test_gradients_are_read_anew_each_time():
    gradient = torch.tensor([3.0])
    consensus = RiskConsensus([OwnedGradient(0, gradient)], 1, torch.device("cpu"))
    first = consensus.unit_norms()
    gradient.fill_(5.0)
    assert consensus.unit_norms().per_unit.tolist() == [5.0]
    assert first.per_unit.tolist() == [3.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_marks_its_unit_and_the_whole(bad):
    owned = pieces((0, [1.0]), (1, [bad, 1.0]))
    norms = RiskConsensus(owned, 2, torch.device("cpu")).unit_norms()
    assert np.isfinite(norms.per_unit).tolist() == [True, False]
    assert not np.isfinite(norms.global_norm)


def test_a_rank_without_gradients_contributes_nothing():
    norms = RiskConsensus([], 2, torch.device("cpu")).unit_norms()
    assert norms.per_unit.tolist() == [0.0, 0.0]
    assert norms.global_norm == 0.0


def test_squares_beyond_the_range_of_fp32_do_not_overflow():
    norms = RiskConsensus(pieces((0, [1e30])), 1, torch.device("cpu")).unit_norms()
    assert norms.per_unit[0] == pytest.approx(1e30, rel=1e-6)


def test_another_engine_version_is_refused_with_the_command_to_run(monkeypatch):
    monkeypatch.setattr(engine_compat, "version", lambda _: "0.19.2")
    with pytest.raises(
        EngineError,
        match=r"megatron-core 0\.19\.2 is installed, but 0\.16\.1 is needed: pip install",
    ):
        engine_compat.check_engine()
