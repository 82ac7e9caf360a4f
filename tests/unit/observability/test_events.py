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
    EventReader,
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
        max_recovered=st.none() | st.integers(0, 9),
        total_steps=st.none() | st.integers(1, 9),
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
    st.builds(start_event, resumed_from=st.none() | NAMES, num_parameters=st.none() | st.just(58)),
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
    reader = EventReader(path)
    assert len(list(reader)) == 1
    assert reader.half_line == 2
    path.write_text(to_line(step_event(1)))
    assert len(list(reader)) == 1
    assert reader.half_line is None


def changed(event, **changes):
    """The event's line with other values; `...` takes a field away."""
    record = {**json.loads(to_line(event)), **changes}
    kept = {key: value for key, value in record.items() if value is not ...}
    return json.dumps(kept).encode() + b"\n"


UNIT = {"unit": "a", "gnmr": 1.0, "delta_gnmr": 1.0, "score": 1.0, "lock": 0, "reason": "risky"}
DECISION = DecisionEvent(step=1, selected=[SelectedUnit(**UNIT)])
BROKEN = {
    b"{broken\n": "Expecting property name",
    b"\x00\x00\xff\n": "",
    b"\n": "Expecting value",
    b"[1]\n": "a JSON object was expected",
    b'{"event": "party"}\n': "unknown event 'party'; known are start, step, decision",
    b'{"event": ["step"]}\n': r"unknown event \['step'\]",
    changed(step_event(1), loss=...): "missing 1 required keyword-only argument: 'loss'",
    changed(step_event(1), loss="high"): "loss: 'high' is no float",
    changed(step_event(1), loss=None): "loss: None is no float",
    changed(step_event(1), step="1"): "step: '1' is no int",
    changed(step_event(1), updated=1): "updated: 1 is no bool",
    changed(step_event(1), recovered="L3.fc1"): "recovered: 'L3.fc1' is no list",
    changed(step_event(1), recovered=[3]): "recovered: 3 is no str",
    changed(step_event(1), mood="good", hue=1): "unknown fields hue, mood",
    changed(DECISION, selected=...): "missing 1 required keyword-only argument: 'selected'",
    changed(DECISION, selected=[3]): "SelectedUnit: a JSON object was expected",
    changed(DECISION, selected=[{**UNIT, "gnmr": "?"}]): r"gnmr: '\?' is no float",
    changed(start_event(), schema_version=2): "schema_version 2; this version reads 1",
}


@pytest.mark.parametrize("line", BROKEN, ids=map(str, range(len(BROKEN))))
def test_a_broken_line_is_an_error_with_file_line_and_reason(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_bytes(to_line(step_event(1)).encode() + line + to_line(step_event(2)).encode())
    message = rf"events\.jsonl:2: is no event that this version knows: .*{BROKEN[line]}"
    with pytest.raises(DataError, match=message):
        read_events(path)


def test_fields_that_came_later_may_be_missing():
    step = from_line(changed(step_event(1), max_recovered=..., total_steps=...))
    assert (step.max_recovered, step.total_steps) == (None, None)
    assert from_line(changed(start_event(), num_parameters=...)).num_parameters is None


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


def test_a_broken_line_among_those_to_keep_stops_the_resume_and_nothing_changes(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = [to_line(step_event(1)), "{broken\n", to_line(step_event(2)), to_line(step_event(3))]
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=r"events\.jsonl:2: .*mend or remove this line"):
        EventLog.resume(tmp_path, 2)
    assert path.read_text() == "".join(lines)


def test_what_a_crash_left_behind_the_last_step_moves_aside(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(to_line(step_event(1)).encode() + b"{broken\n\x00\x00\xff")
    EventLog.resume(tmp_path, 1).close()
    assert steps_of(path) == [("step", 1)]
    assert (tmp_path / "events.superseded.jsonl").read_bytes() == b"{broken\n\x00\x00\xff\n"


def test_a_summary_in_the_last_event_comes_back():
    last = {"step": 1, "reason": "completed", "loss": 1.0, "seconds": 1.0, "tokens": 1}
    line = to_line(FinishEvent(summary={"last_loss": math.nan, "units": [1.5]}, **last))
    assert from_line(line).summary == {"last_loss": "nan", "units": [1.5]}
