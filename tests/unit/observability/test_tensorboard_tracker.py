"""TensorBoard files read back by TensorBoard's own reader."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.dashboards.scalars import step_scalars
from gnmr_megatron.observability.trackers import make_trackers
from tests.unit.observability.test_events import step_event
from tests.unit.observability.tracked_run import UNITS, gnmr, loss, track


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Steps 1 to 12, which end in an error; from step 9 on again, to 20."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    settings = {"tensorboard": True, "unit_metrics": ["*.layers.0.*"]}
    track(folder, 1, 12, how="error", **settings)
    track(folder, 9, 20, **settings)
    everything = {"scalars": 0, "histograms": 0}
    return EventAccumulator(str(folder / "tensorboard"), size_guidance=everything).Reload()


def test_scalars_have_the_names_that_wandb_has(board):
    names = set(step_scalars(step_event(1)))
    unit = UNITS.ids[0]
    ours = {*names, "eval/loss", "eval/perplexity", f"gnmr/{unit}", f"delta_gnmr/{unit}"}
    assert set(board.Tags()["scalars"]) == ours


def test_each_step_is_there_once_although_some_were_taken_twice(board):
    told = {scalar.step: scalar.value for scalar in board.Scalars("train/loss")}
    assert [scalar.step for scalar in board.Scalars("train/loss")] == list(range(1, 21))
    assert told == pytest.approx({step: loss(step) for step in range(1, 21)})
    ratios = [scalar.value for scalar in board.Scalars(f"gnmr/{UNITS.ids[0]}")]
    assert ratios == pytest.approx([gnmr(step)[0] for step in range(1, 21)])
    assert [(s.step, s.value) for s in board.Scalars("eval/loss")] == [(20, 1.5)]


def test_a_histogram_shows_the_units_whose_gnmr_is_a_number(board):
    ten, twenty = board.Histograms("control/gnmr")
    assert (ten.step, twenty.step) == (10, 20)
    assert ten.histogram_value.num == 1  # the other one's is infinite
    assert ten.histogram_value.sum == pytest.approx(gnmr(10)[0])


def test_a_missing_tensorboardx_is_told_in_a_line_and_training_goes_on(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    config = TrackingConfig(console="quiet", wandb_mode="disabled", tensorboard=True)
    group = make_trackers(tmp_path, config, run_config={})
    group.record(step_event(1))
    group.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "tracking.tensorboard needs tensorboardX: pip install tensorboardX" in line


def test_nothing_is_written_unless_asked_for(tmp_path):
    track(tmp_path / "run", 1, 2)
    assert not (tmp_path / "run" / "tensorboard").exists()
