import subprocess
import sys

import pytest

from gnmr_megatron.errors import ConfigError
from gnmr_megatron.observability import trackers
from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.trackers import NullTracker, TrackerGroup, make_trackers
from tests.unit.observability.test_events import step_event


class Working:
    def __init__(self):
        self.seen, self.closed = [], False

    def record(self, event):
        self.seen.append(event.step)

    def close(self):
        self.closed = True


class Failing(Working):
    def record(self, event):
        super().record(event)
        raise ConnectionError("network is down")


def test_a_tracker_that_fails_is_dropped_with_one_line_and_the_others_go_on(capsys):
    working, failing = Working(), Failing()
    group = TrackerGroup([failing, working])
    for step in (1, 2, 3):
        group.record(step_event(step))
    group.close()
    assert working.seen == [1, 2, 3]
    assert working.closed
    assert failing.seen == [1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "Failing failed and is off from here on (ConnectionError: network is down)"
    )


def test_a_tracker_that_fails_on_closing_does_not_keep_the_others_open(capsys):
    class Stuck(Working):
        def close(self):
            raise TimeoutError("upload")

    working = Working()
    TrackerGroup([Stuck(), working]).close()
    assert working.closed
    assert capsys.readouterr().err.startswith("Stuck failed")


def test_a_standard_error_that_is_gone_does_not_stop_training(monkeypatch):
    class Gone:
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    working = Working()
    TrackerGroup([Failing(), working]).record(step_event(1))
    assert working.seen == [1]


def test_settings_choose_the_trackers(tmp_path, monkeypatch, capsys):
    made = {}

    def refuse(*_):
        raise OSError("disk is full\nreally")

    def mine(folder, config, run_config, write_report):
        made.update(folder=folder, run_config=run_config)
        return NullTracker()

    monkeypatch.setattr(trackers, "TRACKERS", {**trackers.TRACKERS, "refuse": refuse, "mine": mine})
    quiet = TrackingConfig(console="quiet", wandb_mode="disabled")
    group = make_trackers(tmp_path, quiet, run_config={"seed": 7})
    group.record(step_event(1))
    group.close()
    assert made == {"folder": tmp_path, "run_config": {"seed": 7}}
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("tracker refuse failed and is off from here on (OSError: disk is full")
    lines = TrackingConfig(wandb_mode="disabled")
    make_trackers(tmp_path, lines, run_config={}).record(step_event(1))
    assert capsys.readouterr().out.startswith("step 1 ")


@pytest.mark.parametrize("key", ["log_interval", "wandb_table_interval"])
def test_an_interval_of_nothing_is_refused_by_its_key(key):
    with pytest.raises(ConfigError, match=f"tracking.{key}: 0 must be at least 1"):
        TrackingConfig(**{key: 0})


def test_neither_torch_nor_wandb_is_imported_until_it_is_needed():
    code = (
        "import importlib, pkgutil, sys\n"
        "import gnmr_megatron.observability as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'megatron', 'wandb', 'tensorboardX'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
