"""Each fault that a run is told to meet is detected, logged with rank and unit, and survived."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from gnmr_megatron.observability.events import (
    CheckpointEvent,
    DecisionEvent,
    FaultEvent,
    FinishEvent,
    StepEvent,
    read_events,
)
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from gnmr_megatron.training.checkpoint_files import verify
from tests.conftest import TINY, options, run_cli

PP2 = {"parallel.pipeline_model_parallel_size": 2}
FC1, FC2, QKV = (
    "decoder.layers.3.mlp.linear_fc1",
    "decoder.layers.0.mlp.linear_fc2",
    "decoder.layers.1.self_attention.linear_qkv",
)
CALM = {"gnmr.alpha": 4, "gnmr.beta": 4, "optimizer.lr": 1e-6}  # nothing is risky by itself
FAULTS = f"""[
  {{kind: scale_gradient, step: 20, unit: {FC1}, factor: 50}},
  {{kind: poison_gradient, step: 24, unit: {FC2}, value: .nan}},
  {{kind: activation_burst, step: 28, unit: {QKV}, factor: 100}},
  {{kind: stale_scale, step: 30, unit: {FC1}, factor: 100}},
  {{kind: learning_rate_spike, step: 31, factor: 30}},
  {{kind: bad_batch, step: 32}},
  {{kind: slow_rank, step: 36, rank: 1, seconds: 15}},
  {{kind: full_disk, step: 39, steps: 4}},
]"""


def settings(dataset, runs_dir, **changes):
    return options(
        {**TINY, **PP2, "data.datasets": f"[{dataset}]", "runs_dir": runs_dir, **changes}
    )


@pytest.fixture(scope="module")
def faulty(dataset, tmp_path_factory):
    """One run through all faults that a process survives."""
    runs_dir = tmp_path_factory.mktemp("faulty")
    changes = {**CALM, "train.steps": 45, "checkpoint.interval": 8, "faults": FAULTS}
    result = run_cli("train", *settings(dataset, runs_dir, **changes))
    assert result.returncode == 0, result.stderr
    return runs_dir / "run"


def events(run, kind):
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def faults(run, kind):
    return [event for event in events(run, FaultEvent) if event.kind == kind]


def test_every_injected_fault_is_told_as_such(faulty):
    told = [(e.step, e.message.split()[0], e.rank, e.units) for e in faults(faulty, "injected")]
    assert told == [
        (20, "scale_gradient", None, [FC1]),
        (24, "poison_gradient", None, [FC2]),
        (28, "activation_burst", None, [QKV]),
        (30, "stale_scale", None, [FC1]),
        (31, "learning_rate_spike", None, []),
        (32, "bad_batch", None, []),
        (36, "slow_rank", 1, []),
        *((step, "full_disk", None, []) for step in range(39, 43)),
    ]


def test_a_scaled_gradient_is_decided_upon_at_once(faulty):
    (decision,) = (event for event in events(faulty, DecisionEvent) if event.step == 20)
    first = decision.selected[0]
    assert first.unit == FC1
    assert first.gnmr == pytest.approx(50, rel=0.5)
    recovered = {event.step: event.recovered for event in events(faulty, StepEvent)}
    assert FC1 not in recovered[20]
    assert FC1 in recovered[21]


def test_a_poisoned_gradient_is_skipped_and_named_with_its_rank(faulty):
    (fault,) = faults(faulty, "non_finite_gradient")
    assert (fault.step, fault.rank, fault.units) == (24, 0, [FC2])  # layer 0 is on the first stage
    skipped = [event.step for event in events(faulty, StepEvent) if not event.updated]
    assert skipped == [24]
    (decision,) = (event for event in events(faulty, DecisionEvent) if event.step == 24)
    assert decision.selected[0].unit == FC2
    assert not read_risk_matrix(faulty).updated[23]


def test_outliers_of_an_activation_are_decided_upon(faulty):
    (decision,) = (event for event in events(faulty, DecisionEvent) if event.step == 28)
    assert decision.selected[0].unit == QKV


def test_a_scale_far_too_large_makes_a_gradient_vanish_for_its_step(faulty):
    matrix = read_risk_matrix(faulty)
    column = matrix.units.index(FC1)
    assert not matrix.recovered[29, column]
    vanished = matrix.norms[:, column] == 0
    assert np.flatnonzero(vanished).tolist() == [29]


def test_a_learning_rate_spike_lasts_for_its_step(faulty):
    rates = {event.step: event.learning_rate for event in events(faulty, StepEvent)}
    usual = (rates[30] + rates[32]) / 2
    assert rates[31] == pytest.approx(30 * usual, rel=0.05)


def test_a_bad_batch_is_trained_on(faulty):
    """A model that has learned as little as this one sees no spike in it."""
    (event,) = (event for event in events(faulty, StepEvent) if event.step == 32)
    others = [e.loss for e in events(faulty, StepEvent) if e.step != 32]
    assert event.updated
    assert event.loss not in others


def test_the_slow_rank_is_named_while_others_wait(faulty):
    (slow,) = (fault for fault in faults(faulty, "slow_rank") if fault.step == 36)
    assert slow.rank == 1
    assert "rank 1: step 36, reading data, is in gnmr_megatron/training/faults.py" in slow.message
    assert "rank 0: step 36, training, waits in" in slow.message


def test_a_full_disk_loses_no_record_and_no_step(faulty):
    (full,) = faults(faulty, "disk_full")
    assert full.step == 39
    (failed,) = faults(faulty, "checkpoint_failed")
    assert "step_00000040: cannot be written" in failed.message
    assert "the last checkpoint is that of step 32" in failed.message
    assert [event.step for event in events(faulty, StepEvent)] == list(range(1, 46))
    assert read_risk_matrix(faulty).steps.tolist() == list(range(1, 46))
    saved = events(faulty, CheckpointEvent)
    assert [event.step for event in saved] == [8, 16, 24, 32, 45]
    assert not verify(faulty / "checkpoints/step_00000045")


def test_a_run_that_stands_still_ends_and_names_who_holds_it_up(dataset, tmp_path):
    stall = "[{kind: slow_rank, step: 6, rank: 1, seconds: 600}]"
    started = time.monotonic()
    result = run_cli(
        "train", *settings(dataset, tmp_path, faults=stall, **{"train.hang_timeout_seconds": 5})
    )
    assert time.monotonic() - started < 90
    assert result.returncode == 1
    assert "no progress for 5 s (train.hang_timeout_seconds), waiting for rank 1" in result.stderr
    (hang,) = faults(tmp_path / "run", "hang")
    assert (hang.step, hang.rank) == (6, 1)
    assert "rank 1: step 6, reading data" in hang.message
    assert "rank 0: step 6, training, waits in" in hang.message


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_saves_and_stops_all(dataset, tmp_path, number):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "gnmr_megatron", "train",
         *settings(dataset, tmp_path, **{"train.steps": 5000})],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    run = tmp_path / "run"
    deadline = time.monotonic() + 90
    while not (run / "events.jsonl").exists() or len(events(run, StepEvent)) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    ranks = psutil.Process(process.pid).children()
    ranks[-1].send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    (saved,) = events(run, CheckpointEvent)
    (finish,) = events(run, FinishEvent)
    assert (saved.kind, finish.reason) == ("signal", "signal")
    assert saved.step == finish.step == events(run, StepEvent)[-1].step


def test_a_checkpoint_that_takes_too_long_after_a_signal_is_given_up(dataset, tmp_path):
    slow = "[{kind: slow_rank, step: 4, rank: 1, seconds: 30}]"
    changes = {"faults": slow, "checkpoint.stop_seconds": 2, "train.steps": 5000}
    process = subprocess.Popen(
        [sys.executable, "-m", "gnmr_megatron", "train", *settings(dataset, tmp_path, **changes)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    run = tmp_path / "run"
    deadline = time.monotonic() + 90
    while not (run / "events.jsonl").exists() or not faults(run, "injected"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # rank 1 sleeps in Python, where signals are handled
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "not stopped 2 s after the signal (checkpoint.stop_seconds)" in stderr
    assert not events(run, CheckpointEvent)
