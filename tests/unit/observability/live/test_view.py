import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    FaultEvent,
    FinishEvent,
)
from gnmr_megatron.observability.live.progress import RunProgress
from gnmr_megatron.observability.live.unit_risks import UnitRisk
from gnmr_megatron.observability.live.view import Snapshot, render
from tests.unit.observability.test_events import start_event, step_event

FC1 = "decoder.layers.3.mlp.linear_fc1"
RISKS = [
    UnitRisk(FC1, 1.5, is_recovered=True, is_selected=True),
    UnitRisk(
        "decoder.layers.11.self_attention.linear_qkv", 1.0, is_recovered=False, is_selected=True
    ),
    UnitRisk("decoder.layers.0.mlp.linear_fc2", 0.5, is_recovered=False, is_selected=False),
    UnitRisk("odd", math.inf, is_recovered=False, is_selected=False),
]
START = start_event(num_parameters=58_100_000, control={}, time=0.0)
STEP = step_event(
    5,
    loss=2.34567,
    grad_norm=0.6543,
    learning_rate=3.01e-4,
    tokens_per_second=3255.4,
    step_seconds=2.0,
    control_seconds=0.01,
    recovered=[FC1],
    over_threshold=3,
    time=10.0,
)
SAVED = CheckpointEvent(
    step=4,
    path="runs/tiny/checkpoints/step_00000004",
    seconds=1.4,
    bytes=50_800_000,
    kind="periodic",
)
FAULT = FaultEvent(step=3, kind="x", rank=7, units=[FC1], message="bad\x1b[31m\nthing [bold]")
HELD_OUT = EvaluationEvent(step=4, loss=4.6461, perplexity=104.18, tokens=9, seconds=1.0)


def rows_of(*events, width=100, height=40, now=10.0, risks=RISKS):
    """The view as rich prints it on a console of that size, row by row."""
    progress = RunProgress()
    for event in events:
        progress.add(event)
    rows = render(Snapshot(progress=progress, risks=risks, now=now), width=width, height=height)
    recording = Console(
        record=True, width=width, height=height, force_terminal=True, file=io.StringIO()
    )
    for row in rows:
        recording.print(row, highlight=False)
    return recording.export_text().split("\n")[:-1]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_every_value_shown_is_that_of_an_event(width):
    text = "\n".join(rows_of(START, step_event(4), STEP, HELD_OUT, SAVED, FAULT, width=width))
    for part in (
        "tiny   gnmr (active)  58.1 M parameters",
        "  step 5/20   25%  eta 0:00:10",  # 15 steps of 0.9 x 0.5 + 0.1 x 2 s
        "loss         2.3457",
        "held-out     4.6461  perplexity 104.18 at step 4",
        "gradient      0.654",
        "speed         3,255 tok/s  2 s a step  lr 3.01e-04",
        "recovered       1/2  L3.fc1  (3 over a threshold)",
        "riskiest       1.50  L3.fc1",
        "               1.00  L11.qkv",
        "control       0.440 % of the time of the last 2 steps",  # 0.001 + 0.01 of 0.5 + 2
        "checkpoint        4  50.8 MB in 1.4 s  runs/tiny",
        "faults            1  step 3 on rank 7: bad",
    ):
        assert part in text


@pytest.mark.parametrize("width", [20, 41, 60, 79, 80, 100, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 9, 16, 50])
def test_no_row_is_too_wide_and_no_view_too_high_and_the_progress_is_always_there(width, height):
    rows = rows_of(START, STEP, HELD_OUT, SAVED, FAULT, width=width, height=height)
    assert len(rows) <= height
    assert max(cell_len(row) for row in rows) <= min(width, 100)
    assert any("━" in row for row in rows)
    if width >= 41:
        assert any("step 5/20" in row for row in rows)


@pytest.mark.parametrize("height", [4, 12, 40])
def test_the_view_never_changes_its_height(height):
    finish = FinishEvent(step=20, reason="completed", loss=1.0, seconds=9.0, tokens=1)
    stages = [[START], [START, STEP], [START, STEP, SAVED, FAULT, HELD_OUT, finish]]
    assert len({len(rows_of(*events, height=height)) for events in stages}) == 1
    assert len(rows_of(START, risks=[], height=height)) == len(rows_of(START, height=height))


def test_the_middle_of_a_bar_is_a_score_of_one_and_an_arrow_is_beyond_its_end():
    bars = [
        row[30:].split("  ")[0] for row in rows_of(START, STEP) if "L3.fc1" in row or "odd" in row
    ]
    over, beyond = bars[1], bars[2]
    assert over.index("╋") == beyond.index("╋") == 19
    assert over.count("━") + 1 == round(0.75 * 39)
    assert beyond.endswith("▶")
    assert len(beyond) == 39
    (one,) = [row for row in rows_of(START, STEP) if "L11.qkv" in row]
    assert "╋" in one  # half of 39 cells is up to the mark


def test_units_on_the_recovery_path_and_those_chosen_are_told():
    rows = rows_of(START, STEP)
    (fc1, qkv, fc2) = (
        next(row for row in rows if f"{score}  {unit}" in row)
        for score, unit in (("1.50", "L3.fc1"), ("1.00", "L11.qkv"), ("0.50", "L0.fc2"))
    )
    assert fc1.endswith("  recovered")
    assert qkv.endswith("  next")
    assert fc2.rstrip().endswith("│")


def test_curves_are_the_losses_of_all_steps_and_the_last_norms():
    steps = [step_event(step, loss=9.0 - step, grad_norm=step) for step in range(1, 9)]
    text = "\n".join(rows_of(START, *steps))
    assert "loss         1.0000  █▇▆▅▄▃▂▁  all steps" in text
    assert "gradient          8  ▁▂▃▄▅▆▇█  last 8" in text


def test_silence_the_end_and_a_skipped_step_are_told():
    assert "no step for 0:05:00" in rows_of(START, STEP, now=310.0)[1]
    done = FinishEvent(step=20, reason="completed", loss=1.0, seconds=131.0, tokens=1)
    assert "completed in 0:02:11" in rows_of(START, STEP, done, now=9e9)[1]
    died = FinishEvent(step=20, reason="diverged", loss=1.0, seconds=131.0, tokens=1)
    assert "ended (diverged) after 0:02:11" in rows_of(START, STEP, died)[1]
    skipped = step_event(6, loss=math.nan, grad_norm=math.inf, updated=False)
    text = "\n".join(rows_of(START, STEP, skipped))
    assert "loss            nan  ▁×" in text
    assert "inf  ▁×  last 2  SKIPPED" in text


def test_what_events_say_cannot_move_the_cursor_or_style_the_view():
    name = start_event(run="a\x1b[2Jb", control={})
    text = "\n".join(rows_of(name, STEP, FAULT))
    assert "\x1b" not in text
    assert "bad?[31m thing [bold]" in text
    assert "a?[2Jb" in text


def test_nothing_is_known_before_the_start():
    assert "waiting for the run to start" in rows_of()[0]
