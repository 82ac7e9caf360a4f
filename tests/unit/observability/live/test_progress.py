import math

import pytest

from gnmr_megatron.observability.events import FaultEvent, FinishEvent
from gnmr_megatron.observability.live.progress import RunProgress
from tests.unit.observability.test_events import start_event, step_event


def progress_of(*events):
    progress = RunProgress()
    for event in events:
        progress.add(event)
    return progress


def test_control_is_its_share_of_the_last_hundred_steps():
    early = [step_event(step, step_seconds=9.0, control_seconds=9.0) for step in range(1, 51)]
    late = [step_event(step, step_seconds=2.0, control_seconds=0.01) for step in range(51, 151)]
    assert progress_of(start_event(), *early, *late).control_percent == pytest.approx(0.5)
    assert math.isnan(progress_of(start_event()).control_percent)


def test_silence_is_told_when_it_is_long_for_this_run():
    slow = progress_of(
        start_event(time=0.0),
        *(step_event(step, step_seconds=20.0, time=20.0 * step) for step in (1, 2, 3)),
    )
    assert slow.silent_seconds(60.0 + 199.0) is None  # ten steps of 20 s are its patience
    assert slow.silent_seconds(60.0 + 201.0) == 201.0
    fast = progress_of(start_event(time=0.0), step_event(1, time=1.0))
    assert fast.silent_seconds(60.0) is None
    assert fast.silent_seconds(62.0) == 61.0


def test_a_run_that_has_ended_is_not_silent():
    end = FinishEvent(step=1, reason="completed", loss=2.0, seconds=1.0, tokens=1, time=2.0)
    assert (
        progress_of(start_event(time=0.0), step_event(1, time=1.0), end).silent_seconds(1e6) is None
    )


def test_a_resume_goes_on_and_is_not_finished():
    end = FinishEvent(step=5, reason="signal", loss=2.0, seconds=1.0, tokens=1)
    progress = progress_of(start_event(), step_event(5), end, start_event(6, total_steps=30))
    assert progress.finish is None
    assert (progress.step, progress.total_steps) == (5, 30)


def test_plain_values_are_those_of_the_events():
    fault = FaultEvent(step=2, kind="x", rank=None, units=[], message="bad")
    plain = progress_of(start_event(), step_event(2, loss=1.5, recovered=["a"]), fault).as_dict()
    shown = {
        key: plain[key] for key in ("run", "step", "loss", "recovered", "faults", "last_fault")
    }
    assert shown == {
        "run": "tiny",
        "step": 2,
        "loss": 1.5,
        "recovered": ["a"],
        "faults": 1,
        "last_fault": "bad",
    }
    assert plain["max_recovered"] == 2
    assert plain["eta_seconds"] == pytest.approx(18 * 0.5)
