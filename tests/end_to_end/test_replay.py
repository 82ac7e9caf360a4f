"""The verbs over recorded runs, on a run that was really trained, resumed and resumed with other settings."""

import json

import pytest

from gnmr_megatron.observability.summary import summarize
from tests.conftest import TINY, options, run_cli


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """Twelve steps: eight, then four with another threshold, budget and lock."""
    runs_dir = tmp_path_factory.mktemp("trained")
    settings = {**TINY, "data.datasets": f"[{dataset}]", "runs_dir": runs_dir}
    settings |= {"checkpoint.interval": 8, "data.train_samples": 96, "gnmr.alpha": 1.05}
    first = run_cli("train", *options({**settings, "train.steps": 8}))
    assert first.returncode == 0, first.stderr
    changed = {"train.steps": 12, "gnmr.beta": 1.05, "gnmr.max_recovered": 1, "gnmr.lock_steps": 4}
    second = run_cli("train", *options({**settings, **changed}), "--resume", "latest")
    assert second.returncode == 0, second.stderr
    return runs_dir / "run"


def test_a_trained_and_resumed_run_replays_to_the_last_decision(trained):
    result = run_cli("replay", trained, "--json")
    assert result.returncode == 0, result.stderr
    replayed, summary = json.loads(result.stdout), summarize(trained)
    assert set(replayed) == {
        "identical",
        "steps",
        "recovered_unit_steps",
        "exceedance_rate",
        "switches",
    }
    assert replayed["identical"] is True
    assert replayed["steps"] == 12
    assert replayed["recovered_unit_steps"] == summary.recovered_unit_steps > 0
    assert replayed["exceedance_rate"] == pytest.approx(summary.over_threshold_percent / 100)


def test_a_flipped_selection_stops_the_replay_with_its_step_and_unit(trained, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("events.jsonl", "config.yaml", "units.json", "risk_matrix.bin"):
        (copy / name).write_bytes((trained / name).read_bytes())
    matrix = bytearray((copy / "risk_matrix.bin").read_bytes())
    matrix[-1] ^= 2  # the flags of the last unit after the last step
    (copy / "risk_matrix.bin").write_bytes(matrix)
    result = run_cli("replay", copy)
    assert result.returncode == 1
    assert f"{copy}: step 12: selected after it, recorded: " in result.stderr
    assert "decoder.layers.3.mlp.linear_fc2" in result.stderr


def test_other_settings_are_shown_beside_the_recorded_ones(trained):
    result = run_cli("replay", trained, "--gnmr.max_recovered", "0")
    assert result.returncode == 0, result.stderr
    assert "gnmr.max_recovered: 3, then 1 -> 0" in result.stdout
    assert "this is an estimate" in result.stdout
    wrong = run_cli("replay", trained, "--gnmr.alhpa", "2")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == (
        "gnmr-megatron replay: unknown option --gnmr.alhpa; did you mean `gnmr.alpha`?\n"
    )


def test_settings_of_the_second_attempt_are_in_force_after_the_resume(trained):
    thresholds = []
    for step in (8, 9):
        result = run_cli("explain", trained, "--step", step, "--json")
        assert result.returncode == 0, result.stderr
        explained = json.loads(result.stdout)
        assert explained["as_recorded"] is True
        thresholds.append((explained["beta"], explained["max_recovered"], explained["lock_steps"]))
    assert thresholds == [(1.3, 3, 2), (1.05, 1, 4)]
    assert run_cli("diff", trained, trained).returncode == 0
