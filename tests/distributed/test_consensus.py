"""All ranks decide alike whatever one of them reports, at no further collective; one that does not is found."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY, options
from tests.distributed.fire_worker import ODD_NORMS, ODD_STEP, ODD_UNIT, STEPS, UNITS
from tests.references.control_reference import ReferenceController

WORKER = Path(__file__).with_name("fire_worker.py")
RANKS = 4


@pytest.fixture(scope="module")
def ranks(dataset, tmp_path_factory):
    """What each of four ranks saw, TP 2 x PP 2."""
    folder = tmp_path_factory.mktemp("fire")
    settings = {
        **TINY,
        "data.datasets": f"[{dataset}]",
        "runs_dir": folder,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.pipeline_model_parallel_size": 2,
    }
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    result = subprocess.run(
        [sys.executable, *command, WORKER, folder, *options(settings)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("odd", ODD_NORMS)
def test_every_rank_knows_the_same_bits_and_decides_as_the_reference(ranks, odd):
    """One rank reports something odd; rank 3 has no unit, since there are more ranks than units."""
    first, *others = [rank["decisions"][odd] for rank in ranks]
    assert all(other == first for other in others)
    reference = ReferenceController(
        UNITS,
        {
            "alpha": 2.0,
            "beta": 1e9,
            "delta": 2,
            "max_recovered": 1,
            "lock_steps": 1,
            "warmup_steps": 1,
        },
    )
    for step in range(1, STEPS + 1):
        norms = [1.0] * UNITS
        if step == ODD_STEP:
            norms[ODD_UNIT] = ODD_NORMS[odd]
        seen = first[step - 1]
        assert seen["norms"] == [value.hex() for value in norms]
        expected = reference.decide(norms, step=step, updated=all(map(math.isfinite, norms)))
        assert seen["selected"] == expected["selected"]


def test_one_bit_decides_on_all_ranks_alike(ranks):
    selected = {
        odd: ranks[3]["decisions"][odd][ODD_STEP - 1]["selected"]
        for odd in ("one_bit_below", "at_threshold", "one_bit_above", "nan", "inf", "zero")
    }
    assert selected == {
        "one_bit_below": [],
        "at_threshold": [],
        "one_bit_above": [ODD_UNIT],
        "nan": [ODD_UNIT],
        "inf": [ODD_UNIT],
        "zero": [],
    }


def test_control_adds_no_collective_and_eight_bytes_a_unit(ranks):
    for rank in ranks:
        plain, control = rank["collectives"]["plain"], rank["collectives"]["control"]
        assert control["calls"] == plain["calls"]
        # the risk vector takes the place of the engine's norm, a float32
        assert control["bytes"] - plain["bytes"] == 8 * (rank["units"] + 1) - 4


def test_a_rank_that_decided_otherwise_is_named_on_every_rank_within_seconds(ranks):
    messages = {rank["disagreement"]["error"] for rank in ranks}
    assert len(messages) == 1
    assert "step 4: ranks [2] decided another recovery set than the other 3 ranks" in messages.pop()
    assert max(rank["disagreement"]["seconds"] for rank in ranks) < 10
