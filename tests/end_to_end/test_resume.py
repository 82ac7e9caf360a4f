"""A run that was interrupted goes on as if it had not been, in the same layout or another."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gnmr_megatron.observability.events import (
    CheckpointEvent,
    FaultEvent,
    FinishEvent,
    StepEvent,
    read_events,
)
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import TINY, options, run_cli

PP2 = {"parallel.pipeline_model_parallel_size": 2}
STEPS, SAVED = 10, 6


def settings(dataset, runs_dir, **changes):
    return options(
        {
            **TINY,
            "data.datasets": f"[{dataset}]",
            "runs_dir": runs_dir,
            "train.steps": STEPS,
            "checkpoint.interval": SAVED,
            "precision.rounding": "stochastic",
            **changes,
        }
    )


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """A run that was never interrupted."""
    runs_dir = tmp_path_factory.mktemp("whole")
    result = run_cli("train", *settings(dataset, runs_dir))
    assert result.returncode == 0, result.stderr
    return runs_dir / "run"


@pytest.fixture
def crashed(whole, tmp_path):
    """A copy of it that lost its last checkpoint, as after a crash between checkpoints."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:08d}")
    (folder / "checkpoints" / f"step_{STEPS:08d}.partial").mkdir()
    return folder


def steps(run):
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, StepEvent)]


def events(run, kind):
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def test_resume_gives_the_same_losses_norms_and_recovery_sets_to_the_bit(
    dataset, whole, crashed, tmp_path
):
    result = run_cli("train", *settings(dataset, tmp_path), "--resume", "latest")
    assert result.returncode == 0, result.stderr
    told = [
        (e.step, e.loss, e.grad_norm, e.learning_rate, e.tokens, e.recovered)
        for e in steps(crashed)
    ]
    assert told == [
        (e.step, e.loss, e.grad_norm, e.learning_rate, e.tokens, e.recovered) for e in steps(whole)
    ]
    ours, reference = read_risk_matrix(crashed), read_risk_matrix(whole)
    np.testing.assert_array_equal(ours.norms, reference.norms)
    np.testing.assert_array_equal(ours.selected, reference.selected)
    dead = (crashed / "events.superseded.jsonl").read_text().splitlines()
    dead_steps = [record["step"] for record in map(json.loads, dead) if record["event"] == "step"]
    assert dead_steps == list(range(SAVED + 1, STEPS + 1))


def test_resume_goes_on_in_another_layout(dataset, whole, crashed, tmp_path):
    result = run_cli(
        "train", *settings(dataset, tmp_path, **PP2), "--resume", str(crashed), "--json"
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["steps"], summary["finished"]) == (STEPS, "completed")
    # stochastic rounding draws the noise of a unit by its name, so the pipeline changes nothing
    np.testing.assert_allclose(
        [e.loss for e in steps(crashed)], [e.loss for e in steps(whole)], rtol=1e-6
    )
    np.testing.assert_array_equal(
        read_risk_matrix(crashed).selected, read_risk_matrix(whole).selected
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.ffn_hidden_size": 256}, "model.ffn_hidden_size: saved 128, now 256"),
        ({"gnmr.delta": 3}, "history `recent` has shape"),
        ({"train.steps": 500}, "train.steps: 500 needs 4000 training sequences"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint_are_refused_with_what_differs(
    dataset, crashed, tmp_path, changes, message
):
    result = run_cli("train", *settings(dataset, tmp_path, **changes), "--resume", "latest")
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_changed_learning_rate_is_taken_on_resume(dataset, whole, crashed, tmp_path):
    result = run_cli(
        "train", *settings(dataset, tmp_path, **{"optimizer.lr": 3e-5}), "--resume", "latest"
    )
    assert result.returncode == 0, result.stderr
    rates = [
        (a.learning_rate, b.learning_rate)
        for a, b in zip(steps(crashed), steps(whole), strict=True)
    ]
    assert all(ours == theirs for ours, theirs in rates[:SAVED])
    np.testing.assert_allclose([ours / theirs for ours, theirs in rates[SAVED:]], 0.1, rtol=1e-6)


def test_another_batch_size_restarts_the_history_and_says_so(dataset, crashed, tmp_path):
    changes = {"train.global_batch_size": 4, "data.train_samples": STEPS * 8}
    result = run_cli("train", *settings(dataset, tmp_path, **changes), "--resume", "latest")
    assert result.returncode == 0, result.stderr
    assert [event.kind for event in events(crashed, FaultEvent)] == ["history_restart"]
    matrix = read_risk_matrix(crashed)
    assert (matrix.gnmr[SAVED] == 1).all()  # no history yet
    assert not matrix.selected[SAVED : SAVED + TINY["gnmr.warmup_steps"]].any()


def test_control_can_be_turned_on_in_a_run_that_started_without_it(dataset, tmp_path):
    plan = {"data.train_samples": STEPS * 8}
    without = run_cli(
        "train", *settings(dataset, tmp_path, **plan, **{"gnmr.mode": "disabled", "train.steps": 3})
    )
    assert without.returncode == 0, without.stderr
    result = run_cli("train", *settings(dataset, tmp_path, **plan), "--resume")
    assert result.returncode == 0, result.stderr
    matrix = read_risk_matrix(tmp_path / "run")
    assert matrix.steps.tolist() == list(range(4, STEPS + 1))
    assert (matrix.gnmr[0] == 1).all()
    assert [event.step for event in steps(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_sigterm_saves_exits_with_zero_and_can_be_resumed(dataset, tmp_path):
    arguments = settings(
        dataset, tmp_path, **PP2, **{"train.steps": 5000, "checkpoint.interval": 0}
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gnmr_megatron", "train", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    run = tmp_path / "run"
    deadline = time.monotonic() + 90
    while not (run / "events.jsonl").exists() or len(steps(run)) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    (saved,) = events(run, CheckpointEvent)
    (finish,) = events(run, FinishEvent)
    assert (saved.kind, finish.reason) == ("signal", "signal")
    assert saved.step == finish.step == steps(run)[-1].step
    result = run_cli(
        "train", *settings(dataset, tmp_path, **PP2, **{"train.steps": saved.step + 2, "data.train_samples": 40_000}),
        "--resume", "auto", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [event.step for event in steps(run)] == list(range(1, saved.step + 3))
