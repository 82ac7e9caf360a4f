import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    DecisionEvent,
    EvaluationEvent,
    FaultEvent,
    FinishEvent,
    SelectedUnit,
    StartEvent,
    StepEvent,
    from_line,
    read_events,
    to_line,
)

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
NAMES = st.text(max_size=8)


def step_event(step, **changes):
    fields = {
        "loss": 2.5,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 128 * step,
        "tokens_per_second": 1000.0,
        "step_seconds": 0.5,
        "control_seconds": 0.001,
        "recovered": [],
        "updated": True,
        "over_threshold": 0,
        "riskiest_unit": "decoder.layers.3.mlp.linear_fc1",
        "riskiest_score": 0.5,
    }
    return StepEvent(step=step, **{**fields, **changes})


def start_event(step=1, **changes):
    fields = {
        "run": "tiny",
        "resumed_from": None,
        "world_size": 4,
        "layout": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "num_units": 16,
        "max_recovered": 2,
        "total_steps": 20,
        "policy": "gnmr",
        "mode": "active",
        "environment": {"torch": "2.13.0"},
    }
    return StartEvent(step=step, **{**fields, **changes})


EVENTS = st.one_of(
    st.builds(
        step_event,
        st.integers(1, 10**9),
        loss=NUMBERS,
        grad_norm=NUMBERS,
        recovered=st.lists(NAMES, max_size=3),
        riskiest_unit=st.none() | NAMES,
        riskiest_score=NUMBERS,
    ),
    st.builds(
        DecisionEvent,
        step=st.integers(1, 100),
        time=st.just(1.0),
        selected=st.lists(
            st.builds(
                SelectedUnit,
                unit=NAMES,
                gnmr=NUMBERS,
                delta_gnmr=NUMBERS,
                score=NUMBERS,
                lock=st.integers(0, 9),
                reason=NAMES,
            ),
            max_size=3,
        ),
    ),
    st.builds(
        EvaluationEvent,
        step=st.just(1),
        loss=NUMBERS,
        perplexity=NUMBERS,
        tokens=st.just(5),
        seconds=NUMBERS,
    ),
    st.builds(
        FaultEvent,
        step=st.just(1),
        kind=NAMES,
        rank=st.none() | st.integers(0, 9),
        units=st.lists(NAMES),
        message=NAMES,
    ),
    st.builds(
        FinishEvent, step=st.just(1), reason=NAMES, loss=NUMBERS, seconds=NUMBERS, tokens=st.just(1)
    ),
    st.builds(
        CheckpointEvent,
        step=st.just(1),
        path=NAMES,
        seconds=NUMBERS,
        bytes=st.integers(0),
        kind=NAMES,
    ),
    st.builds(start_event),
)


def same(a, b):
    """Equality in which NaN equals NaN."""
    return repr(a) == repr(b)


@given(event=EVENTS)
def test_an_event_survives_its_line_of_strict_json(event):
    line = to_line(event)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["event"] == event.name
    assert same(from_line(line), event)


def test_numbers_that_are_not_finite_are_strings():
    record = json.loads(
        to_line(step_event(1, loss=math.nan, grad_norm=math.inf, riskiest_score=-math.inf))
    )
    assert (record["loss"], record["grad_norm"], record["riskiest_score"]) == ("nan", "inf", "-inf")


def test_a_last_line_that_is_still_written_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(step_event(1)) + to_line(step_event(2))[:-20])
    assert [event.step for event in read_events(path)] == [1]


@pytest.mark.parametrize(
    "line", ["{broken\n", '{"event": "party"}\n', '{"event": "step"}\n', "[1]\n"]
)
def test_a_broken_line_is_an_error_with_file_and_line(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(step_event(1)) + line + to_line(step_event(2)))
    with pytest.raises(DataError, match=r"events\.jsonl:2: is no event that this version knows"):
        list(read_events(path))


def steps_of(path):
    return [(event.name, event.step) for event in read_events(path)]


def test_resume_moves_the_steps_after_the_checkpoint_aside(tmp_path):
    log = EventLog(tmp_path)
    log.append(start_event(1))
    for step in range(1, 6):
        log.append(step_event(step))
    log.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(to_line(step_event(6))[:30])  # killed while writing
    log = EventLog.resume(tmp_path, 3)
    log.append(start_event(4, resumed_from="step_00000003"))
    log.append(step_event(4))
    log.close()
    assert steps_of(tmp_path / "events.jsonl") == [
        ("start", 1), ("step", 1), ("step", 2), ("step", 3), ("start", 4), ("step", 4),
    ]  # fmt: skip
    dead = (tmp_path / "events.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in dead[:2]] == [4, 5]
    assert dead[2] == to_line(step_event(6))[:30]


def test_a_second_resume_at_the_same_step_keeps_one_record_of_each_step(tmp_path):
    for _ in range(2):
        log = EventLog.resume(tmp_path, 0)
        log.append(start_event(1))
        log.append(step_event(1))
        log.close()
    assert [step for name, step in steps_of(tmp_path / "events.jsonl") if name == "step"] == [1]
