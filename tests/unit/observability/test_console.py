import io
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gnmr_megatron.observability.console import (
    ConsoleTracker,
    JsonTracker,
    duration,
    short_unit,
)
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    FaultEvent,
    FinishEvent,
    to_line,
)
from tests.unit.observability.test_events import start_event, step_event

FINISH = FinishEvent(step=1, reason="completed", loss=2.0, seconds=1.0, tokens=10)


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
        FINISH,
    ]
    lines = lines_of(events)
    assert len(lines) == len(events)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", "".join(lines))
    assert long_path in lines[2]
    assert "step 1 on rank 3: skipped (L0.fc2)" in lines[3]
    assert lines[4] == "held-out   loss 2.0000  perplexity 7.39  10 tokens in 1.0 s"
    assert lines[5] == "finish     completed at step 1  loss 2.0000  10 tokens in 0:00:01"


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.6, "0:01:00"),
        (49598, "13:46:38"),
        (86399.7, "1d 00:00"),
        (999_998, "11d 13:46"),
        (1e12, "11574074d 01:46"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_durations_are_legible_at_any_length(seconds, text):
    assert duration(seconds) == text


def test_a_budget_that_changes_is_that_of_the_step():
    *_, line = lines_of([start_event(), step_event(1, max_recovered=5)])
    assert "recovered 0/5" in line


def test_a_step_without_a_start_is_a_line_too():
    (line,) = lines_of([step_event(7, loss=math.nan, grad_norm=math.inf)])
    assert line.startswith("step 7  eta       -  loss     nan")
    assert "grad      inf" in line


def test_a_message_stays_on_one_line_and_brings_no_control_characters():
    message = "bad\nnews \x1b[31mred\x1b[0m [bold]not markup[/bold]"
    event = FaultEvent(step=3, kind="signal", rank=None, units=list("abcdefg"), message=message)
    (line,) = lines_of([event])
    text = "bad news ?[31mred?[0m [bold]not markup[/bold] (a, b, c, d, e and 2 more)"
    assert line == f"fault      step 3: {text}"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_colours_and_the_same_words(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    events = [start_event(), step_event(1, recovered=["a"], riskiest_score=2.0, updated=False)]
    out = Terminal()
    console = ConsoleTracker(file=out)
    for event in events:
        console.record(event)
    assert "\x1b[33m  recovered 1/2" in out.getvalue()
    assert "\x1b[31m  SKIPPED" in out.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain.splitlines() == lines_of(events)


def test_a_file_gets_no_colours_where_a_cluster_asks_for_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CLICOLOR_FORCE"):
        monkeypatch.setenv(name, "1")
    lines = lines_of([start_event(), step_event(1, recovered=["a"], riskiest_score=2.0)])
    assert not {"\x1b", "\r"} & set("".join(lines))


def test_json_is_the_lines_of_the_log_and_nothing_else():
    events = [start_event(), step_event(1, loss=math.nan), FINISH]
    out = io.StringIO()
    tracker = JsonTracker(file=out)
    for event in events:
        tracker.record(event)
    tracker.close()
    assert out.getvalue() == "".join(map(to_line, events))


def test_a_reader_that_goes_away_does_not_stop_training():
    code = (
        "import sys\n"
        "from gnmr_megatron.observability.console import ConsoleTracker\n"
        "from gnmr_megatron.observability.trackers import TrackerGroup\n"
        "from tests.unit.observability.test_events import start_event, step_event\n"
        "trackers = TrackerGroup([ConsoleTracker()])\n"
        "trackers.record(start_event())\n"
        "sys.stdin.read()  # until the reader is gone\n"
        "for step in range(1, 21): trackers.record(step_event(step))\n"
        "print('a summary that nobody reads')\n"
        "sys.stderr.write('trained to the end')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("start")
    process.stdout.close()
    process.stdin.close()
    warning, last = process.stderr.read().splitlines()
    process.stderr.close()
    assert warning.startswith("ConsoleTracker failed and is off from here on (BrokenPipeError")
    assert last == "trained to the end"
    assert process.wait() == 0
