import io
import re

from gnmr_megatron.observability.console import ConsoleTracker, short_unit
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    FaultEvent,
    FinishEvent,
)
from tests.unit.observability.test_events import start_event, step_event


def lines_of(events, **settings):
    out = io.StringIO()
    console = ConsoleTracker(file=out, **settings)
    for event in events:
        console.record(event)
    console.close()
    return out.getvalue().splitlines()


def test_piped_output_is_one_plain_line_an_event():
    long_path = "runs/" + "x" * 200
    events = [
        start_event(),
        step_event(1),
        CheckpointEvent(step=1, path=long_path, seconds=1.5, bytes=2_000_000, kind="periodic"),
        FaultEvent(
            step=1,
            kind="non_finite_loss",
            rank=3,
            units=["decoder.layers.0.mlp.linear_fc2"],
            message="skipped",
        ),
        EvaluationEvent(step=1, loss=2.0, perplexity=7.389, tokens=10, seconds=1.0),
        FinishEvent(step=1, reason="completed", loss=2.0, seconds=1.0, tokens=10),
    ]
    lines = lines_of(events)
    assert len(lines) == len(events)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", "".join(lines))
    assert long_path in lines[2]
    assert "step 1 on rank 3: skipped (L0.fc2)" in lines[3]
    assert "perplexity 7.39" in lines[4]


def test_a_step_tells_progress_losses_recovery_and_the_riskiest_unit():
    recovered = ["decoder.layers.1.mlp.linear_fc1"]
    *_, line = lines_of(
        [start_event(), step_event(1), step_event(5, recovered=recovered, riskiest_score=1.75)]
    )
    for part in (
        "step  5/20  25%",
        "loss  2.5000",
        "1,000 tok/s",
        "recovered 1/2",
        "riskiest L3.fc1",
        "1.75",
    ):
        assert part in line


def test_the_first_step_does_not_count_for_the_time_left():
    *_, line = lines_of(
        [start_event(), step_event(1, step_seconds=60.0), step_event(2, step_seconds=1.0)]
    )
    assert "eta 0:00:18" in line  # 18 steps of a second


def test_a_skipped_step_says_so():
    assert lines_of([start_event(), step_event(1, updated=False)])[-1].endswith("SKIPPED")


def test_only_some_steps_are_printed_but_always_the_first_and_the_last():
    events = [start_event(), *(step_event(step) for step in range(1, 21))]
    shown = [
        int(line.split("/")[0].removeprefix("step"))
        for line in lines_of(events, log_interval=6)[1:]
    ]
    assert shown == [1, 6, 12, 18, 20]


def test_units_are_named_shortly():
    assert short_unit("decoder.layers.12.self_attention.linear_qkv") == "L12.qkv"
    assert short_unit("something.else") == "something.else"
