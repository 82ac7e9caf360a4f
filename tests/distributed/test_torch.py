"""Plain PyTorch on two processes: norms of shards are those of the whole, and both ranks decide alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.observability.events import StepEvent

WORKER = Path(__file__).with_name("torch_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the one launch of this file wrote."""
    folder = tmp_path_factory.mktemp("torch")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [sys.executable, *command, WORKER, folder],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", ["fsdp_first", "fsdp_after", "tensor_parallel", "trainer"])
def test_norms_equal_those_of_the_gathered_gradients_and_are_the_same_on_both_ranks(ranks, case):
    assert ranks[0][case]["measured"] == ranks[1][case]["measured"]
    for rank in ranks:
        for measured, expected in zip(rank[case]["measured"], rank[case]["expected"], strict=True):
            assert measured == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", ["fsdp_first", "fsdp_after"])
def test_shards_are_put_on_the_paths_that_the_controller_decides(ranks, case):
    for rank in ranks:
        found = rank[case]
        assert found["recovered"] == found["decided"]
        assert sum(map(len, found["recovered"])) >= 2
        assert max(map(len, found["recovered"])) == 1
        for paths, recovered in zip(found["paths"][1:], found["recovered"], strict=False):
            assert paths == {name: "fp32" if name in recovered else "saved_int8" for name in paths}


def test_attaching_before_and_after_sharding_is_the_same(ranks):
    assert ranks[0]["fsdp_first"] == ranks[0]["fsdp_after"]


def test_a_gradient_that_is_not_summed_yet_is_summed_before_its_norm(ranks):
    expected = 3 * (16 * 32) ** 0.5  # ranks hold ones and twos
    assert ranks[0]["partial"] == pytest.approx([expected, 0, 0, 0])


def test_paths_under_tensor_parallelism_are_refused(ranks):
    assert "is a DTensor in the forward pass" in ranks[0]["refusal"]


def test_the_trainer_really_ran_under_ddp(ranks):
    assert ranks[1]["trainer"]["is_ddp"] == "DistributedDataParallel"


def test_plain_torch_loads_neither_megatron_core_nor_transformers(ranks):
    assert ranks[0]["needless"] == []


def test_the_plain_example_recovers_the_shocked_unit_under_fsdp2_and_learns(folder):
    run = RecordedRun(folder / "example")
    steps = list(run.events_of(StepEvent))
    assert [step.step for step in steps if step.recovered] == [31, 32, 33, 34]
    assert steps[30].recovered == ["layers.2.up"]
    assert steps[-1].loss < steps[0].loss / 2
    assert run.starts[0].world_size == 2
