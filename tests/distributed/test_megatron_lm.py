"""Megatron-LM's optimizer step under control: the same norms, updates and collectives, and decisions besides."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gnmr_megatron.analysis.recorded_run import RecordedRun
from tests.distributed.megatron_lm_cases import ACTIVE, ACTIVE_STEPS, CASES, CLIP_GRAD, SAVED_STEP

WORKER = Path(__file__).with_name("megatron_lm_worker.py")
RANKS, UNITS = 4, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the one launch of this file wrote."""
    folder = tmp_path_factory.mktemp("megatron_lm")
    for name in ("fp32", "dist_opt"):
        (folder / name).mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
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
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_the_norm_and_the_clipped_updates_are_those_of_megatron_core(ranks, case):
    for rank in ranks:
        plain, controlled = rank["cases"][case]
        assert controlled["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        assert min(plain["norms"]) > CLIP_GRAD  # so every step was clipped
        ours, theirs = (np.concatenate(run["weights"]) for run in (controlled, plain))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_control_adds_no_collective_and_eight_bytes_a_unit(ranks, case):
    for rank in ranks:
        plain, controlled = rank["cases"][case]
        assert controlled["calls"] == plain["calls"]
        added = np.subtract(controlled["bytes"], plain["bytes"])
        assert set(added.tolist()) == {8 * (UNITS + 1) - 4}


@pytest.mark.parametrize("case", CASES)
def test_unit_norms_equal_those_of_the_whole_gradients_on_every_rank(ranks, case):
    # shards are reduced alike, so what is whole without the distributed optimizer is the reference with it
    reference = "bf16_tp2_dp2" if case == "sharded_tp2_dp2" else case
    if CASES[reference].sharded:
        pytest.skip("no rank holds whole gradients")
    for rank in ranks:
        expected, measured = rank["cases"][reference][0]["whole"], rank["cases"][case][1]["units"]
        assert measured == ranks[0]["cases"][case][1]["units"]
        for step, units in enumerate(measured):
            assert len(units) == UNITS
            assert units == pytest.approx(expected[step], rel=1e-5)


def test_the_squares_of_units_are_a_part_of_the_square_of_the_whole_norm(ranks):
    for _, controlled in ranks[0]["cases"].values():
        for norm, units in zip(controlled["norms"], controlled["units"], strict=True):
            assert 0 < sum(x * x for x in units.values()) < norm * norm


@pytest.mark.parametrize("run", ["fp32.None", "dist_opt.None"])
def test_every_rank_recovers_what_the_controller_decides_within_the_budget(ranks, run):
    first = ranks[0]["active"][run]
    assert first["recovered"] == first["controller"]
    assert sum(map(len, first["recovered"])) >= 3
    assert max(map(len, first["recovered"])) == ACTIVE.max_recovered
    for rank in ranks[1:]:
        for key in ("recovered", "units", "norms"):
            assert rank["active"][run][key] == first[key]


@pytest.mark.parametrize("run", ["fp32.None", "dist_opt.None", "fp32.sharded", "dist_opt.sharded"])
def test_units_run_the_next_step_on_the_path_that_was_decided(ranks, run):
    for rank in ranks:
        found = rank["active"][run]
        for step in range(1, len(found["paths"])):
            for name, path in found["paths"][step].items():
                is_recovered = name in found["recovered"][step - 1]
                assert path == ("saved_int8" if is_recovered else "saved_int4")


@pytest.mark.parametrize("run", ["fp32.sharded", "fp32.whole", "dist_opt.sharded"])
def test_a_run_from_a_checkpoint_goes_on_to_the_bit(ranks, run):
    for rank in ranks:
        resumed, whole = rank["active"][run], rank["active"][run.partition(".")[0] + ".None"]
        for key in ("units", "norms", "recovered", "paths"):
            assert resumed[key] == whole[key][SAVED_STEP:]
        assert resumed["weights"] == whole["weights"]


def test_the_run_folder_tells_the_whole_run_after_a_restart(folder, ranks):
    run = RecordedRun(folder / "fp32" / "run")
    assert run.matrix.steps.tolist() == list(range(1, ACTIVE_STEPS + 1))
    selected = [
        {run.matrix.units[index] for index in np.flatnonzero(row)} for row in run.matrix.selected
    ]
    assert selected == [set(names) for names in ranks[0]["active"]["fp32.None"]["recovered"]]
    assert run.starts[0].control["alpha"] == ACTIVE.alpha
    assert [start.step for start in run.starts] == [1, SAVED_STEP + 1, SAVED_STEP + 1]


def test_what_cannot_be_done_is_refused_in_one_line_alike_on_every_rank(ranks):
    found = ranks[0]["refusals"]
    assert all(rank["refusals"] == found for rank in ranks)
    assert found["active"].startswith("ConfigError: gnmr.mode: active needs the two paths")
    for word in ("saved_int4 cannot run on", "LAYER_SPEC", "monitor"):
        assert word in found["no_paths"]
    assert "gnmr.mode: disabled" in found["disabled"]
    assert "DistributedDataParallel" in found["unwrapped"]
    assert "set clip_grad above 0" in found["no_norm"]
    assert all("\n" not in message for message in found.values())
