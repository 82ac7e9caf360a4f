"""The sentences of a verdict, each for a run that calls for it."""

import dataclasses
import math
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.report.figures import control_figures, loss_figures
from gnmr_megatron.analysis.report.history import read_history
from gnmr_megatron.analysis.report.locks import lock_occupancy
from gnmr_megatron.analysis.report.spikes import find_spikes
from gnmr_megatron.analysis.report.verdict import Findings, verdict
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import EvaluationEvent, FaultEvent, FinishEvent
from tests.unit.observability.test_events import start_event, step_event

A, B = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"


@pytest.fixture
def told(tmp_path):
    """The verdict on a run of 100 steps of 16 units whose steps are changed by a function of the step."""

    def tell(change=lambda step: {}, *, settings=None, finish="completed", more=(), steps=100):
        folder = Path(mkdtemp(dir=tmp_path))
        log = EventLog(folder)
        settings = settings or ControlConfig(max_recovered=2, warmup_steps=10)
        log.append(
            start_event(
                total_steps=100,
                mode=settings.mode,
                policy=settings.policy,
                control=dataclasses.asdict(settings),
            )
        )
        for step in range(1, steps + 1):
            log.append(step_event(step, **{"loss": 5.0 - 0.01 * step, **change(step)}))
        for event in more:
            log.append(event)
        if finish:
            log.append(FinishEvent(step=steps, reason=finish, loss=1.0, seconds=1.0, tokens=1))
        log.close()
        history = read_history(RecordedRun(folder))
        locked = lock_occupancy(history.selections, history.series.step)
        return verdict(
            Findings(
                history=history,
                losses=loss_figures(history.series),
                control=control_figures(history, locked, settings),
                settings=settings,
                spikes=find_spikes(history),
            )
        )

    return tell


def kinds(sentences, part):
    return [sentence.kind for sentence in sentences if part in sentence.text]


@pytest.mark.parametrize(
    ("finish", "steps", "kind", "text"),
    [
        ("completed", 100, "good", "Completed: 100 of 100 steps."),
        (None, 40, "warning", "Not finished: 40 of 100 steps so far"),
        (None, 0, "warning", "Not finished: 0 of 100 steps so far"),
        ("diverged", 50, "warning", "Diverged after 50 of 100 steps"),
        ("signal", 60, "note", "Stopped by a signal after 60 of 100 steps"),
        ("error", 60, "warning", "Ended by an error (error) after 60 of 100 steps"),
    ],
)
def test_the_first_sentence_says_how_it_ended(told, finish, steps, kind, text):
    first = told(finish=finish, steps=steps)[0]
    assert (first.kind, text in first.text) == (kind, True)


def test_the_loss_is_told_by_means_of_windows(told):
    sentences = told()
    first, last = (
        np.mean([5 - 0.01 * s for s in range(1, 9)]),
        np.mean([5 - 0.01 * s for s in range(93, 101)]),
    )
    text = f"The training loss fell from {first:.4f} to {last:.4f} (means of 8 steps)."
    assert kinds(sentences, text) == ["good"]


def test_a_loss_that_rises_again_is_told(told):
    sentences = told(lambda step: {"loss": 2.0 + 0.001 * abs(step - 50) ** 2 - 0.03 * step})
    assert kinds(sentences, "It ends clearly above its best") == ["warning"]


def test_a_loss_that_did_not_fall_is_told(told):
    assert kinds(told(lambda step: {"loss": 3.0 + 0.01 * step}), "did not fall") == ["warning"]


def test_losses_that_are_not_finite_are_counted(told):
    sentences = told(lambda step: {"loss": math.nan if step in (5, 9) else 1.0 - step / 1000})
    assert kinds(sentences, "2 steps had a loss that is not finite") == ["warning"]
    nothing = told(lambda step: {"loss": math.inf})
    assert kinds(nothing, "No step had a finite loss.") == ["warning"]


def test_held_out_text_is_told_or_its_lack(told):
    event = EvaluationEvent(step=100, loss=4.0, perplexity=54.6, tokens=9, seconds=1.0)
    assert kinds(told(), "Held-out text was not evaluated") == ["note"]
    assert kinds(told(more=[event]), "loss 4.0000, perplexity 54.60, at step 100") == ["note"]


def test_nothing_recovered_because_no_threshold_was_passed(told):
    sentences = told(lambda step: {"riskiest_score": 0.87 if step == 50 else 0.4})
    text = "no unit passed a threshold after the warm-up (the highest score was 0.87, of L3.fc1 at step 50"
    assert kinds(sentences, text) == ["warning"]


def test_nothing_recovered_within_the_warm_up(told):
    settings = ControlConfig(warmup_steps=200)
    assert kinds(told(settings=settings), "still within the 200 warm-up steps") == ["warning"]


def test_nothing_recovered_although_thresholds_were_passed(told):
    sentences = told(lambda step: {"over_threshold": 1, "max_recovered": 0})
    assert kinds(sentences, "100 unit-steps passed a threshold, but none was given a place") == [
        "warning"
    ]


def test_monitor_and_disabled_say_so(told):
    settings = ControlConfig(mode="monitor")
    assert kinds(told(settings=settings), "Control only watched (gnmr.mode: monitor)") == ["note"]
    settings = ControlConfig(mode="disabled")
    assert kinds(told(settings=settings), "Control was off (gnmr.mode: disabled)") == ["note"]


def test_what_was_recovered_is_told_with_the_unit_that_was_most_often(told):
    sentences = told(lambda step: {"recovered": [A] * (step % 9 == 0) + [B] * (step % 12 == 0)})
    text = "19 unit-steps ran on the recovery path, 1.2 % of all; L0.fc1 most often, in 11 steps."
    assert kinds(sentences, text) == ["warning"]  # it has more than half
    assert kinds(sentences, "one run cannot tell") == ["note"]


@pytest.mark.parametrize(
    ("over", "kind", "text"),
    [
        (3, "good", "0.19 % of unit-steps were over a threshold; the paper reports 0.2 %."),
        (10, "note", "0.62 % of unit-steps were over a threshold, 3.1 times the paper's 0.2 %."),
        (100, "warning", "6.2 % of unit-steps were over a threshold, 31 times the paper's 0.2 %"),
    ],
)
def test_exceedance_is_compared_with_the_paper(told, over, kind, text):
    assert kinds(told(lambda step: {"over_threshold": int(step <= over)}), text) == [kind]


def test_a_budget_that_is_always_full_is_told(told):
    full = told(lambda step: {"recovered": [A, B] if step > 11 else [], "over_threshold": 3})
    assert kinds(full, "The budget was full in 100 % of the steps after the warm-up") == ["warning"]
    assert kinds(full, "In 100 steps more units were over a threshold than") == ["note"]


def test_a_budget_that_is_seldom_full_is_a_note(told):
    half = told(lambda step: {"recovered": [A, B] if step > 56 else [A]})
    assert kinds(half, "The budget was full in 49 % of the steps.") == ["note"]


def test_spikes_cost_and_faults_are_told(told):
    fault = FaultEvent(step=7, kind="slow_rank", rank=1, units=[], message="slow")
    sentences = told(
        lambda step: {
            "loss": 50.0 if step in (40, 80) else 5 - step / 100,
            "over_threshold": int(step == 39),
            "control_seconds": 0.1,
            "updated": step != 3,
        },
        more=[fault],
    )
    text = "2 loss spikes; a unit was over a threshold in the 10 steps before 1 of them, and in the very step of 0."
    assert kinds(sentences, text) == ["warning"]
    assert kinds(sentences, "Deciding and switching took 20 % of the step time") == ["warning"]
    assert kinds(sentences, "Faults that were survived: slow rank (1).") == ["warning"]
    assert kinds(sentences, "The optimizer skipped 1 step.") == ["warning"]


def test_another_policy_is_not_compared_with_the_paper(told):
    settings = ControlConfig(policy="zscore", max_recovered=2, warmup_steps=10)
    sentences = told(lambda step: {"over_threshold": 1, "recovered": [A]}, settings=settings)
    assert kinds(sentences, "they are those of policy zscore") == ["note"]
    assert kinds(sentences, "paper") == []
