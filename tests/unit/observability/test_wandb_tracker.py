"""Real offline W&B runs in processes of their own, read back record by record."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.dashboards.wandb_tracker import WandbTracker
from gnmr_megatron.observability.trackers import TrackerGroup
from tests.conftest import ROOT
from tests.references.wandb_file import read_records
from tests.unit.observability.test_events import start_event, step_event
from tests.unit.observability.tracked_run import CONFIG, UNITS, gnmr, loss

LAST = 70
INTERVAL = 10
UNIT = UNITS.ids[1]
COLUMNS = ["step", "unit", "gnmr", "delta_gnmr", "score", "lock", "reason"]
SETTINGS = {
    "wandb_mode": "offline",
    "wandb_project": "tests",
    "wandb_tags": ["small"],
    "wandb_table_interval": INTERVAL,
    "wandb_checkpoints": True,
    "wandb_report": True,
    "unit_metrics": ["*.layers.1.*"],
}


def in_a_process(folder, first, last, ending, *, environment=None, **settings):
    """A part of a tracked run; says nothing unless W&B gives it a reason to."""
    arguments = [f"{key}={json.dumps(value)}" for key, value in {**SETTINGS, **settings}.items()]
    script = "tests.unit.observability.tracked_run"
    command = [sys.executable, "-m", script, folder, str(first), str(last), ending, *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Steps 1 to 60 until it is killed; 56 to 65 from a checkpoint, until an error; 64 to 70."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    results = [in_a_process(folder, 1, 60, "kill"), in_a_process(folder, 56, 65, "error")]
    results.append(in_a_process(folder, 64, LAST, "finish"))
    return folder, results


@pytest.fixture(scope="module")
def runs(processes):
    paths = sorted((processes[0] / "wandb").glob("offline-run-*/*.wandb"))
    return [(path, list(read_records(path))) for path in paths]


def of_kind(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def rows_of(records):
    """Logged rows in order, each {key: value}."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in of_kind(records, "history")
    ]


@pytest.fixture(scope="module")
def rows(runs):
    """Rows of all parts, each with the folder of its files."""
    return [(row, path.parent / "files") for path, records in runs for row in rows_of(records)]


def tables(rows, key):
    for row, files in rows:
        if f"{key}/path" in row:
            yield row["_step"], json.loads((files / row[f"{key}/path"]).read_text())


def test_nothing_is_said_on_the_console(processes):
    told = [(result.returncode, result.stdout, result.stderr) for result in processes[1]]
    assert told == [(-signal.SIGKILL, "", ""), (0, "", ""), (0, "", "")]


def test_every_step_is_there_once_and_in_order_whatever_ended_the_parts(runs, rows):
    kept = len(rows_of(runs[0][1]))
    assert 0 < kept < 60, "W&B's process lost nothing; take more steps, or leave the filling in out"
    assert [row["_step"] for row, _ in rows] == list(range(1, LAST + 1))


def test_scalars_are_those_of_the_step(rows):
    for row, _ in rows:
        step = row["_step"]
        assert row["train/loss"] == pytest.approx(loss(step))
        assert row["control/recovered"] == (1 if step > 1 and step % 5 == 1 else 0)
        assert row["train/tokens"] == 128 * step
        assert row["train/grad_norm"] == 1.0
        assert row["perf/tokens_per_second"] == 1000.0
        assert (row["perf/step_seconds"], row["control/seconds"]) == (0.5, 0.001)
        assert row["control/percent"] == pytest.approx(0.2)
        assert (row["train/learning_rate"], row["control/riskiest_score"]) == (1e-3, 0.5)
    assert (rows[-1][0]["eval/loss"], rows[-1][0]["eval/perplexity"]) == (1.5, 4.5)


def test_the_ratios_of_the_chosen_units_are_there_and_of_no_others(rows):
    for row, _ in rows:
        ratio = gnmr(row["_step"])[1]
        assert float(row[f"gnmr/{UNIT}"]) == ratio
        assert float(row[f"delta_gnmr/{UNIT}"]) == ratio / 2
        assert f"gnmr/{UNITS.ids[0]}" not in row


def test_the_recovery_set_of_each_step_is_a_table(rows):
    parts = list(tables(rows, "control/recovery_set"))
    assert all(content["columns"] == COLUMNS for _, content in parts)
    data = [row for _, content in parts for row in content["data"]]
    assert [row[0] for row in data] == list(range(5, LAST + 1, 5))
    for _, unit, ratio, delta, score, lock, reason in data:
        assert (unit, delta, lock, reason) == (UNIT, 1.5, 5, "risky")
        assert [float(ratio), float(score)] == [math.inf, math.inf]


def test_a_heat_map_comes_with_each_interval_and_with_the_end_of_a_part(rows):
    key = "control/heat_map/path"
    steps = {row["_step"]: files / row[key] for row, files in rows if key in row}
    assert set(range(INTERVAL, LAST + 1, INTERVAL)) | {65} == set(steps)
    for path in steps.values():
        with Image.open(path) as image:
            assert image.format == "PNG"


def test_bar_charts_show_the_riskiest_and_the_recovered_units_of_the_interval(runs, rows):
    riskiest = dict(tables(rows, "control/riskiest_units_table"))
    recovered = dict(tables(rows, "control/recovered_units_table"))
    assert set(riskiest) == set(recovered) >= {10, 20, 70}
    # steps 11 to 20: the first unit at most 1 + 20 / 64, the second infinite at 15 and 20
    assert riskiest[20]["data"] == [["L1.fc1", 1000.0], ["L0.fc1", 1.3125]]
    assert recovered[20]["data"] == [["L1.fc1", 2.0]]  # in 11 and 16
    (config,) = (
        json.loads(item.value_json)
        for record in of_kind(runs[-1][1], "config")
        for item in record.update
        if list(item.nested_key) == ["_wandb", "visualize", "control/riskiest_units"]
    )
    assert config["panel_config"]["panelDefId"] == "wandb/bar/v0"
    assert config["panel_config"]["fieldSettings"] == {"label": "unit", "value": "highest GNMR"}


def test_checkpoints_are_artifacts_that_say_where_they_lie_and_the_report_is_one_with_its_file(
    processes, runs
):
    artifacts = {artifact.type: artifact for artifact in of_kind(runs[-1][1], "artifact")}
    checkpoint = artifacts["checkpoint"]
    folder = processes[0] / "checkpoints" / f"step_{LAST:08d}"
    (entry,) = checkpoint.manifest.contents
    assert (entry.path, entry.ref) == ("shard.bin", f"{folder.as_uri()}/shard.bin")
    assert set(checkpoint.aliases) == {"latest", f"step-{LAST}"}
    assert json.loads(checkpoint.metadata)["step"] == LAST
    (report,) = artifacts["report"].manifest.contents
    assert report.path == "report.html"
    assert not report.ref
    count = len((processes[0] / "events.jsonl").read_text().splitlines())
    assert Path(report.local_path).read_text() == f"<html>[{count}]</html>"


def test_configuration_tags_and_name_are_those_of_one_run(processes, runs):
    for _, records in runs:
        run = of_kind(records, "run")[0]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert {key: config[key] for key in CONFIG} == CONFIG
        assert run.run_id == (processes[0] / "wandb_run_id").read_text().strip()
        assert (run.project, run.display_name, list(run.tags)) == ("tests", "tiny", ["small"])


def test_a_wandb_that_cannot_start_does_not_stop_training(tmp_path, capsys, monkeypatch):
    def init(**_):
        raise RuntimeError("no space\nat all")

    monkeypatch.setattr("wandb.init", init)
    group = TrackerGroup([WandbTracker(tmp_path, TrackingConfig(), run_config={})])
    for event in (start_event(), step_event(1), step_event(2)):
        group.record(event)
    group.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WandbTracker failed and is off from here on (RuntimeError: no space")


class LoggedRun:
    """In the place of a W&B run."""

    offline, id, dir = True, "none", "nowhere/files"

    def __init__(self):
        self.logged, self.summary = [], {}

    def define_metric(self, *_, **__):
        """Nothing."""

    def log(self, values, *, step):
        self.logged.append((step, values))

    def finish(self):
        """Nothing."""


def test_a_long_run_sends_no_more_table_parts_than_wandb_shows(tmp_path, monkeypatch):
    from tests.unit.observability.tracked_run import track

    run = LoggedRun()
    monkeypatch.setattr("wandb.init", lambda **_: run)
    track(tmp_path / "long", 1, 1000, how="error", wandb_mode="offline", wandb_table_interval=1)
    parts = [step for step, values in run.logged if "control/recovery_set" in values]
    assert 80 < len(parts) <= 100
    assert parts[-1] == 1000
