"""Real offline W&B runs, read back record by record."""

import json
import math

import pytest

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.events import (
    DecisionEvent,
    EvaluationEvent,
    FinishEvent,
    SelectedUnit,
)
from gnmr_megatron.observability.wandb_tracker import WandbTracker
from tests.references.wandb_file import history, read_records
from tests.unit.observability.test_events import step_event

UNIT = "decoder.layers.3.mlp.linear_fc1"
SETTINGS = TrackingConfig(wandb_project="tests", wandb_tags=["small"], wandb_table_interval=2)


def decision(step):
    unit = SelectedUnit(
        unit=UNIT, gnmr=3.5, delta_gnmr=math.inf, score=math.inf, lock=5, reason="delta_gnmr"
    )
    return DecisionEvent(step=step, selected=[unit])


def track(folder, steps, *, config):
    tracker = WandbTracker(folder, SETTINGS, run_config=config)
    for step in steps:
        tracker.record(step_event(step, loss=10.0 / step, recovered=[UNIT] if step > 2 else []))
        if step >= 2:
            tracker.record(decision(step))
    tracker.record(
        EvaluationEvent(step=steps[-1], loss=1.5, perplexity=4.5, tokens=10, seconds=1.0)
    )
    tracker.record(
        FinishEvent(step=steps[-1], reason="completed", loss=1.0, seconds=1.0, tokens=10)
    )
    tracker.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of three steps, resumed for two more in the same folder."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    track(folder, [1, 2, 3], config={"seed": 7, "gnmr": {"alpha": 3.0}})
    track(folder, [4, 5], config={"seed": 7, "gnmr": {"alpha": 3.0}})
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def run_record(path):
    return next(
        record.run for record in read_records(path) if record.WhichOneof("record_type") == "run"
    )


def test_scalars_are_at_their_steps(runs):
    rows = history(runs[0])
    assert sorted(rows) == [1, 2, 3]
    for step, row in rows.items():
        assert json.loads(row["train/loss"]) == pytest.approx(10.0 / step)
        assert json.loads(row["control/recovered"]) == (1 if step > 2 else 0)
        assert json.loads(row["train/tokens"]) == 128 * step
    assert json.loads(rows[3]["eval/loss"]) == 1.5
    assert json.loads(rows[3]["eval/perplexity"]) == 4.5


def test_the_recovery_set_of_each_step_is_a_table(runs):
    rows = []
    for path in runs:
        for table in sorted(path.parent.glob("files/media/table/control/*.table.json")):
            content = json.loads(table.read_text())
            assert content["columns"] == [
                "step",
                "unit",
                "gnmr",
                "delta_gnmr",
                "score",
                "lock",
                "reason",
            ]
            rows += content["data"]
    assert [row[0] for row in rows] == [2, 3, 4, 5]
    assert {(row[1], row[2], row[5], row[6]) for row in rows} == {(UNIT, 3.5, 5, "delta_gnmr")}


def test_the_configuration_is_there(runs):
    config = {item.key: json.loads(item.value_json) for item in run_record(runs[0]).config.update}
    assert config["seed"] == 7
    assert config["gnmr"] == {"alpha": 3.0}


def test_a_resumed_run_is_the_same_run_and_goes_on_at_its_step(runs):
    first, second = (run_record(path) for path in runs)
    assert first.run_id == second.run_id
    assert (second.project, second.display_name, list(second.tags)) == ("tests", "tiny", ["small"])
    assert sorted(history(runs[1])) == [4, 5]
