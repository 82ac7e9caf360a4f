"""A small matrix of real runs: taken, resumed where it stopped, with equal budgets, told in a table."""

import csv
import json
import shutil

import pytest
import yaml

from gnmr_megatron.observability.events import StepEvent, read_events
from tests.conftest import TINY, run_cli

LOW = {"precision.low": "saved_int2", "precision.recovery": "saved_int8"}


@pytest.fixture(scope="module")
def taken(dataset, tmp_path_factory):
    """Two arms that need nothing of each other, and one with the budget of the second."""
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "base.yaml").write_text("name: base\n")
    settings = {
        **TINY,
        "data.datasets": [str(dataset)],
        "train.steps": 14,
        "train.eval_interval": 1000,
    }
    suite = {
        "question": "Which units?",
        "low": "int2",
        "high": "bf16",
        "settings": settings,
        "arms": {
            "bf16": {"settings": {"precision.low": "bf16", "precision.recovery": "bf16", "gnmr.mode": "disabled"}},
            "int2": {"settings": LOW},
            "random": {"settings": {**LOW, "gnmr.policy": "random"}, "budget_of": "int2"},
        },
        "sizes": {"small": {"base": "base.yaml", "seeds": [3]}},
    }  # fmt: skip
    (folder / "trial.yaml").write_text(yaml.safe_dump(suite))
    result = experiment(folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def experiment(folder, *arguments):
    return run_cli(
        "experiment", folder / "trial.yaml", "--output", folder / "out", "--jobs", 2, "--json", *arguments
    )  # fmt: skip


def steps(folder, run):
    return [
        e for e in read_events(folder / "out" / run / "events.jsonl") if isinstance(e, StepEvent)
    ]


def test_a_control_arm_recovers_as_many_units_in_each_step(taken):
    folder, _ = taken
    ours, random = (
        [len(event.recovered) for event in steps(folder, run)] for run in ("int2-s3", "random-s3")
    )
    assert ours[1:] == random[1:]  # the first set of an open-loop policy is chosen before any step
    assert sum(ours) > 5


def test_the_figures_are_those_of_the_runs(taken):
    folder, result = taken
    told = json.loads(result.stdout)
    rows = {
        row["arm"]: row
        for row in csv.DictReader((folder / "out/results.csv").read_text().splitlines())
    }
    assert rows.keys() == told["arms"].keys() == {"bf16", "int2", "random"}
    for arm, row in rows.items():
        summary = json.loads(run_cli("summary", folder / f"out/{arm}-s3", "--json").stdout)
        assert float(row["held_out_loss"]) == summary["held_out_loss"]
        assert int(row["recovered_unit_steps"]) == summary["recovered_unit_steps"]
        assert told["arms"][arm]["held_out_loss"] == summary["held_out_loss"]
    assert "bf16-s3" in (folder / "out/report.html").read_text()
    assert float(rows["int2"]["kept_bytes"]) < float(rows["bf16"]["kept_bytes"])


def test_what_is_done_stays_and_what_is_missing_is_taken(taken):
    folder, first = taken
    before = (folder / "out/int2-s3/events.jsonl").read_bytes()
    shutil.rmtree(folder / "out/bf16-s3")
    again = experiment(folder)
    assert again.returncode == 0, again.stderr
    assert [line.split() for line in again.stderr.splitlines()].count(["started", "bf16-s3"]) == 1
    assert "was done int2-s3" in again.stderr
    assert (folder / "out/int2-s3/events.jsonl").read_bytes() == before
    told, anew = (
        json.loads(result.stdout)["arms"]["bf16"]["held_out_loss"] for result in (first, again)
    )
    assert told == anew


def test_a_run_with_other_settings_is_refused(taken):
    folder, _ = taken
    result = experiment(folder, "--set", "optimizer.lr=0.01")
    assert result.returncode == 2
    assert "was started with other settings" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_fails_is_told_with_its_message_and_others_go_on(taken, tmp_path):
    folder, _ = taken
    result = run_cli(
        "experiment", folder / "trial.yaml", "--output", tmp_path, "--jobs", 2,
        "--set", "train.steps=3", "--set", "gnmr.alpha=-1",
    )  # fmt: skip
    assert result.returncode == 1
    assert "gnmr.alpha: -1.0 must be positive and finite" in result.stderr
    assert "random-s3: needs the run of int2" in result.stderr
    assert "Traceback" not in result.stderr
