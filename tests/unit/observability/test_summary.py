import json
import math

import pytest

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    FaultEvent,
    FinishEvent,
)
from gnmr_megatron.observability.summary import as_dict, render, summarize
from tests.unit.observability.test_events import start_event, step_event

A, B = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"


@pytest.fixture
def run(tmp_path):
    log = EventLog(tmp_path)
    log.append(start_event())
    for step, recovered in enumerate(([], [A], [A, B], [A]), start=1):
        log.append(step_event(step, loss=5.0 - step, recovered=recovered, over_threshold=step // 2))
    log.append(FaultEvent(step=4, kind="non_finite_loss", rank=None, units=[], message="skipped"))
    log.append(EvaluationEvent(step=4, loss=1.5, perplexity=4.48, tokens=99, seconds=1.0))
    log.append(
        CheckpointEvent(
            step=4, path="runs/tiny/checkpoints/step_00000004", seconds=1, bytes=1, kind="final"
        )
    )
    log.append(FinishEvent(step=4, reason="completed", loss=1.0, seconds=2.0, tokens=512))
    log.close()
    return tmp_path


def test_figures_are_those_of_the_events(run):
    summary = summarize(run)
    assert (summary.first_loss, summary.last_loss, summary.held_out_loss) == (4.0, 1.0, 1.5)
    assert summary.recovered_unit_steps == 4
    assert summary.recovered_percent == pytest.approx(100 * 4 / (16 * 4))
    assert summary.over_threshold_percent == pytest.approx(100 * (0 + 1 + 1 + 2) / (16 * 4))
    assert summary.most_recovered == [(A, 3), (B, 1)]
    assert summary.control_percent == pytest.approx(100 * 0.001 / 0.5)
    assert (summary.steps, summary.tokens, summary.faults, summary.finished) == (
        4,
        512,
        1,
        "completed",
    )


def test_the_text_names_them_for_people(run):
    text = render(summarize(run))
    for part in (
        "loss       4.0000 -> 1.0000",
        "perplexity 4.48",
        "4 unit-steps, 6.25 %",
        "L0.fc1 (3), L1.fc2 (1)",
    ):
        assert part in text


def test_a_run_that_still_goes_on_is_summarised_so_far(run):
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text[: text.index('{"event": "fault"')] + '{"event": "st')
    summary = summarize(run)
    assert summary.finished is None
    assert summary.steps == 4
    assert "not finished" in render(summary)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"is no run folder, it has no events\.jsonl"):
        summarize(tmp_path)


def test_figures_are_strict_json_also_where_the_loss_is_not_finite(run):
    log = EventLog.resume(run, 4)
    log.append(step_event(5, loss=math.nan))
    log.close()
    text = json.dumps(as_dict(summarize(run)), allow_nan=False)
    values = json.loads(text)
    assert (values["first_loss"], values["last_loss"]) == (4.0, "nan")
    assert values["most_recovered"] == [[A, 3], [B, 1]]
    assert values["files"] == ["events.jsonl"]


def test_a_run_that_goes_on_after_its_end_is_not_finished(run):
    log = EventLog.resume(run, 4)
    log.append(start_event(5))
    log.close()
    assert summarize(run).finished is None


def test_a_run_without_a_step_has_a_summary(tmp_path):
    log = EventLog(tmp_path)
    log.append(start_event())
    log.close()
    text = render(summarize(tmp_path))
    assert "no step yet" in text
    assert "not evaluated" in text
