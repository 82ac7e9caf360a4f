"""Real offline W&B runs in a process of their own, read back record by record."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.events import (
    DecisionEvent,
    EvaluationEvent,
    FinishEvent,
    SelectedUnit,
)
from gnmr_megatron.observability.trackers import TrackerGroup
from gnmr_megatron.observability.wandb_tracker import WandbTracker
from tests.references.wandb_file import read_records
from tests.unit.observability.test_events import start_event, step_event

ROOT = Path(__file__).parents[3]
UNIT = "decoder.layers.3.mlp.linear_fc1"
COLUMNS = ["step", "unit", "gnmr", "delta_gnmr", "score", "lock", "reason"]
CONFIG = {"seed": 7, "gnmr": {"alpha": 3.0}}


def decision(step):
    unit = SelectedUnit(
        unit=UNIT, gnmr=3.5 + step, delta_gnmr=math.inf, score=math.inf, lock=5, reason="risky"
    )
    return DecisionEvent(step=step, selected=[unit])


def track(folder, steps, *, ends):
    """Three steps with decisions from the second on; one that does not end stops as a crash in training does."""
    settings = TrackingConfig(wandb_project="tests", wandb_tags=["small"], wandb_table_interval=2)
    tracker = WandbTracker(folder, settings, run_config=CONFIG)
    tracker.record(start_event(steps[0]))
    for step in steps:
        tracker.record(step_event(step, loss=10.0 / step, recovered=[UNIT] if step > 2 else []))
        if step >= 2:
            tracker.record(decision(step))
    if ends:
        last = {"step": steps[-1], "loss": 1.5, "seconds": 1.0, "tokens": 10}
        tracker.record(EvaluationEvent(perplexity=4.5, **last))
        tracker.record(FinishEvent(reason="completed", **last))
    tracker.close()


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Steps 1 to 3, then the same run again from step 3 to 5, as after a checkpoint at step 2."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    code = (
        "import pathlib, sys, time\n"
        "from tests.unit.observability.test_wandb_tracker import track\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "track(folder, [1, 2, 3], ends=False)\n"
        "time.sleep(1)  # W&B names its folders by the second\n"
        "track(folder, [3, 4, 5], ends=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return folder, result


@pytest.fixture(scope="module")
def runs(process):
    paths = sorted((process[0] / "wandb").glob("offline-run-*/*.wandb"))
    return [(path, list(read_records(path))) for path in paths]


def of_kind(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def rows_of(records):
    """Logged rows in order, each {key: value}."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in of_kind(records, "history")
    ]


def test_nothing_is_said_on_the_console(process):
    _, result = process
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_scalars_are_at_their_steps(runs):
    (_, first), (_, second) = runs
    for records, expected in ((first, [1, 2, 3]), (second, [3, 4, 5])):
        steps = [row for row in rows_of(records) if "train/loss" in row]
        assert [row["step"] for row in steps] == expected
        for row in steps:
            step = row["step"]
            assert row["train/loss"] == pytest.approx(10.0 / step)
            assert row["control/recovered"] == (1 if step > 2 else 0)
            assert row["train/tokens"] == 128 * step
            assert row["train/grad_norm"] == 1.0
            assert row["perf/tokens_per_second"] == 1000.0
            assert (row["perf/step_seconds"], row["control/seconds"]) == (0.5, 0.001)
            assert (row["train/learning_rate"], row["control/riskiest_score"]) == (1e-3, 0.5)
    (evaluation,) = (row for row in rows_of(second) if "eval/loss" in row)
    values = [evaluation[key] for key in ("step", "eval/loss", "eval/perplexity")]
    assert values == [5, 1.5, 4.5]


def test_every_metric_is_drawn_over_the_training_step(runs):
    for _, records in runs:
        metrics = {metric.name or metric.glob_name: metric for metric in of_kind(records, "metric")}
        assert metrics["*"].step_metric == "step"
        assert metrics["eval/loss"].step_metric == "step"


def test_the_recovery_set_of_each_step_is_a_table_also_where_the_run_does_not_end_well(runs):
    seen = []
    for path, records in runs:
        data = []
        for part in rows_of(records):
            if "control/recovery_set/path" in part:
                content = json.loads(
                    (path.parent / "files" / part["control/recovery_set/path"]).read_text()
                )
                assert content["columns"] == COLUMNS
                data += content["data"]
        seen.append(data)
    assert [[row[0] for row in data] for data in seen] == [[2, 3], [3, 4, 5]]
    for row in seen[0] + seen[1]:
        unit, gnmr, delta_gnmr, score, lock, reason = row[1:]
        assert (unit, gnmr, lock, reason) == (UNIT, 3.5 + row[0], 5, "risky")
        assert [float(delta_gnmr), float(score)] == [math.inf, math.inf]


def test_the_configuration_is_there(runs):
    (run, *_) = of_kind(runs[0][1], "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG


def test_a_resumed_run_is_the_same_run(process, runs):
    first, second = (of_kind(records, "run")[0] for _, records in runs)
    assert first.run_id == second.run_id == (process[0] / "wandb_run_id").read_text().strip()
    assert (second.project, second.display_name, list(second.tags)) == ("tests", "tiny", ["small"])


def test_a_wandb_that_cannot_start_does_not_stop_training(tmp_path, capsys, monkeypatch):
    def init(**_):
        raise RuntimeError("no API key\nsee wandb.ai")

    monkeypatch.setattr("wandb.init", init)
    group = TrackerGroup([WandbTracker(tmp_path, TrackingConfig(), run_config={})])
    for event in (start_event(), step_event(1), step_event(2)):
        group.record(event)
    group.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WandbTracker failed and is off from here on (RuntimeError: no API key")


class RecordedRun:
    """In the place of a W&B run."""

    def __init__(self):
        self.logged, self.summary = [], {}

    def define_metric(self, *_, **__):
        """Nothing."""

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        """Nothing."""


def test_a_long_run_sends_no_more_table_parts_than_wandb_shows(tmp_path, monkeypatch):
    run = RecordedRun()
    monkeypatch.setattr("wandb.init", lambda **_: run)
    tracker = WandbTracker(tmp_path, TrackingConfig(wandb_table_interval=1), run_config={})
    tracker.record(start_event(total_steps=1000))
    for step in range(1, 1001):
        tracker.record(step_event(step))
        tracker.record(decision(step))
    tracker.close()
    parts = [values["step"] for values in run.logged if "control/recovery_set" in values]
    assert 80 < len(parts) <= 100
    assert parts[-1] == 1000
