"""60 steps are 37 and 23, and are 20, a killed rank, and torchrun's restart: the same bits, each step told once."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from gnmr_megatron.observability.events import (
    FaultEvent,
    FinishEvent,
    StartEvent,
    StepEvent,
    read_events,
)
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import TINY, options, run_cli

STEPS, FIRST_PART, KILLED_IN, INTERVAL = 60, 37, 21, 8
LAYOUT = {"parallel.pipeline_model_parallel_size": 2}


def settings(dataset, runs_dir, **changes):
    return options(
        {
            **TINY,
            **LAYOUT,
            "data.datasets": f"[{dataset}]",
            "runs_dir": runs_dir,
            "precision.rounding": "stochastic",
            "train.steps": STEPS,
            "optimizer.decay_steps": STEPS,
            "data.train_samples": STEPS * TINY["train.global_batch_size"],
            "checkpoint.interval": INTERVAL,
            **changes,
        }
    )


def done(result):
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """60 steps in one go."""
    runs_dir = tmp_path_factory.mktemp("whole")
    done(run_cli("train", *settings(dataset, runs_dir)))
    return runs_dir / "run"


@pytest.fixture(scope="module")
def in_two_parts(dataset, tmp_path_factory):
    """37 steps, then 23."""
    runs_dir = tmp_path_factory.mktemp("parts")
    done(run_cli("train", *settings(dataset, runs_dir, **{"train.steps": FIRST_PART})))
    done(run_cli("train", *settings(dataset, runs_dir), "--resume", "latest"))
    return runs_dir / "run"


@pytest.fixture(scope="module")
def killed(dataset, tmp_path_factory):
    """One rank dies by SIGKILL in step 21; torchrun starts all again."""
    runs_dir = tmp_path_factory.mktemp("killed")
    done(run_torchrun(*settings(dataset, runs_dir, faults=kill_in(KILLED_IN), resume="auto")))
    return runs_dir / "run"


def kill_in(step):
    return f"[{{kind: kill_rank, step: {step}, rank: 1}}]"


def run_torchrun(*arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    restart = ["--max-restarts=2", "--monitor-interval=0.2", "-m", "gnmr_megatron"]
    return subprocess.run(
        [sys.executable, *launcher, *restart, "train", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(params=["in_two_parts", "killed"])
def resumed(request):
    return request.getfixturevalue(request.param)


def steps(run, name="events.jsonl"):
    return [event for event in read_events(run / name) if isinstance(event, StepEvent)]


def test_every_step_has_the_same_bits(whole, resumed):
    def told(run):
        return [
            (e.step, e.loss, e.grad_norm, e.learning_rate, e.tokens, e.recovered, e.updated)
            for e in steps(run)
        ]

    assert told(resumed) == told(whole)
    ours, reference = read_risk_matrix(resumed), read_risk_matrix(whole)
    for field in ("steps", "norms", "global_norm", "gnmr", "delta_gnmr", "recovered", "selected"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(reference, field))
    assert reference.recovered.sum() >= 20


def test_every_step_is_told_once_and_the_same_state_is_saved(whole, resumed):
    assert [event.step for event in steps(resumed)] == list(range(1, STEPS + 1))
    state = [
        json.loads((run / f"checkpoints/step_{STEPS:08d}/checkpoint.json").read_text())["state"]
        for run in (whole, resumed)
    ]
    assert state[0] == state[1]
    assert state[0]["train"]["consumed_samples"] == STEPS * TINY["train.global_batch_size"]
    assert state[0]["controller"]


def test_a_named_checkpoint_is_taken_up_once_and_restarts_go_on_from_the_newest(
    dataset, in_two_parts, tmp_path
):
    run = shutil.copytree(in_two_parts, tmp_path / "run")
    named = run / "checkpoints/step_00000016"
    faults = kill_in(27)
    shorter = {"train.steps": 32, "resume": named, "faults": faults}
    done(run_torchrun(*settings(dataset, tmp_path, **shorter)))
    starts = [e.step for e in read_events(run / "events.jsonl") if isinstance(e, StartEvent)]
    assert starts == [1, 17, 25]
    assert [event.step for event in steps(run)] == list(range(1, 33))
    aside = sorted(path.name for path in (run / "checkpoints").glob("*.superseded"))
    assert aside[-1] == "step_00000060.superseded"  # what the first start put aside is still there


def test_the_steps_that_died_are_kept_apart_with_the_fault(killed):
    dead = [event.step for event in steps(killed, "events.superseded.jsonl")]
    saved = KILLED_IN // INTERVAL * INTERVAL
    assert dead[0] == saved + 1
    assert dead == list(range(saved + 1, dead[-1] + 1))
    assert KILLED_IN - 1 <= dead[-1] <= KILLED_IN
    faults = [e for e in read_events(killed / "events.jsonl") if isinstance(e, FaultEvent)]
    assert [fault.kind for fault in faults] == ["restart"]
    assert f"steps {saved + 1} to " in faults[0].message
    told = read_events(killed / "events.superseded.jsonl")
    lost = [e for e in told if isinstance(e, FaultEvent) and e.kind == "lost_rank"]
    assert [(fault.rank, fault.step) for fault in lost] == [(1, KILLED_IN)]
    finishes = [e for e in read_events(killed / "events.jsonl") if isinstance(e, FinishEvent)]
    assert [event.reason for event in finishes] == ["completed"]
