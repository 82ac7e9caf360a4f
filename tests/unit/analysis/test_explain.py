"""An explained step has the figures of the slow reference, and words that fit them."""

import json
import math

import numpy as np
import pytest
from rich.console import Console

from gnmr_megatron.analysis.explain import explain, matching
from gnmr_megatron.analysis.explain_text import print_step, sentence
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.cli import explain as verb
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError, DataError
from tests.references.control_reference import ReferenceController
from tests.unit.analysis.recorded import Attempt, lively_norms, record, unit_table

SETTINGS = {
    "alpha": 1.5,
    "beta": 1.4,
    "delta": 3,
    "max_recovered": 2,
    "lock_steps": 3,
    "warmup_steps": 4,
}
STEPS, UNITS = 60, 6
IDS = unit_table(UNITS).ids


@pytest.fixture(scope="module")
def lively(tmp_path_factory):
    norms = lively_norms(STEPS, UNITS, seed=3)
    norms[30, 2] = math.nan
    return record(tmp_path_factory.mktemp("lively") / "run", norms, ControlConfig(**SETTINGS))


def test_every_figure_is_that_of_the_reference(lively):
    run = RecordedRun(lively)
    reference, lock, recovered = ReferenceController(UNITS, SETTINGS), [0] * UNITS, []
    outcomes = set()
    for row in range(STEPS):
        norms = run.matrix.norms[row].tolist()
        means = [unit.mean(SETTINGS) for unit in reference.units]
        recent = [unit.gnmrs[-3:] for unit in reference.units]
        step = explain(run, row + 1)
        decided = reference.decide(norms, step=row + 1, updated=True)
        assert step.as_recorded
        assert step.is_warming_up == (row < 4)
        assert [unit.unit for unit in step.candidates if unit.outcome == "selected"] == [
            IDS[index] for index in decided["selected"]
        ]
        for index, unit in enumerate(step.units):
            assert unit.unit == IDS[index]
            assert unit.mean == means[index]
            past = recent[index]
            expected = (past[0] + past[1] + past[2]) / 3 if len(past) == 3 else None
            assert unit.recent_mean == expected
            for name in ("gnmr", "delta_gnmr", "score"):
                assert getattr(unit, name) == decided[name][index]
            assert (unit.lock_before, unit.lock_after) == (lock[index], decided["lock"][index])
            assert unit.recovered == (index in recovered)
            is_candidate = row >= 4 and (decided["score"][index] > 1 or lock[index] > 0)
            assert (unit.rank is not None) == is_candidate
            selected = index in decided["selected"]
            assert unit.outcome == (
                "selected" if selected else "cut" if is_candidate else "no candidate"
            )
            outcomes.add((unit.outcome, unit.reason))
        lock, recovered = decided["lock"], decided["recovery_set"]
    reasons = ("gnmr", "delta_gnmr", "lock", "non_finite")
    assert {("selected", reason) for reason in reasons} <= outcomes
    assert {("cut", "lock"), ("no candidate", None)} <= outcomes


def test_words_say_why_a_unit_was_selected_cut_or_neither(tmp_path):
    norms = np.ones((12, 4))
    norms[9] = [1.0, 9.0, 5.0, 7.0]
    config = ControlConfig(warmup_steps=2, delta=20, max_recovered=1, lock_steps=2)
    run = RecordedRun(record(tmp_path / "run", norms, config))
    step = explain(run, 10)
    assert sentence(step, step.units[1]) == (
        "L0.proj is selected, 1 of 3: its norm is 9 times the mean of those before (GNMR, above alpha 3). It runs "
        "step 11 on the recovery path and stays a candidate for 2 steps after it."
    )
    assert sentence(step, step.units[3]) == (
        "L0.fc2 is not selected: its norm is 7 times the mean of those before (GNMR, above alpha 3), but the budget "
        "of 1 goes to L0.proj."
    )
    assert sentence(step, step.units[0]) == (
        "L0.qkv is no candidate: GNMR 1 is not above alpha 3, and there are fewer than 20 GNMR values for delta-GNMR "
        "yet."
    )
    after = explain(run, 11)
    assert sentence(after, after.units[1]) == (
        "L0.proj is selected, 1 of 1: it was risky before and is locked for 2 steps (its score, 0.5, is not above 1). "
        "It runs step 12 on the recovery path and stays a candidate for 1 step after it. It ran on the recovery path "
        "in this step."
    )
    warming = explain(run, 2)
    assert "is no candidate: the step is in the warm-up" in sentence(warming, warming.units[0])


def test_the_table_shows_candidates_first_and_what_else_there_is(lively, capsys):
    run = RecordedRun(lively)
    busy = next(
        step for step in range(5, STEPS) if {u.outcome for u in explain(run, step).units} >= {"cut"}
    )
    print_step(Console(width=160), explain(run, busy))
    printed = capsys.readouterr().out
    assert f"step {busy} of {lively}, policy gnmr (active), alpha 1.5, beta 1.4, delta 3" in printed
    assert printed.index("selected") < printed.index(" cut ") < printed.index("no candidate")


def test_units_are_chosen_by_glob_of_id_or_short_name(lively):
    step = explain(RecordedRun(lively), 8)
    assert [unit.unit for unit in matching(step, "decoder.layers.1.*")] == list(IDS[4:])
    assert [unit.unit for unit in matching(step, "*.fc1")] == [IDS[2]]
    with pytest.raises(ConfigError, match=r"matches `L0\.fc3`; did you mean `L0\.fc2`\?"):
        matching(step, "L0.fc3")
    with pytest.raises(ConfigError, match=r"matches `\*zzz\*`; possible: decoder\.layers\.0\."):
        matching(step, "*zzz*")


def test_a_step_that_is_not_there_names_those_that_are(tmp_path):
    on, off = ControlConfig(**SETTINGS), ControlConfig(mode="disabled")
    attempts = [Attempt(1, on), Attempt(11, off), Attempt(21, on)]
    run = RecordedRun(record(tmp_path / "run", lively_norms(30, 4), attempts))
    assert explain(run, 21).is_warming_up
    for step in (0, 15, 31):
        with pytest.raises(
            DataError, match=rf"no norms of step {step}; it has steps 1 to 10, 21 to 30"
        ):
            explain(run, step)


def test_the_verb_prints_strict_json_of_the_chosen_units(lively, capsys):
    assert verb.run([str(lively), "--step", "31", "--unit", "L0.fc1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (printed["step"], printed["alpha"], printed["max_recovered"]) == (31, 1.5, 2)
    assert [(unit["unit"], unit["norm"], unit["reason"]) for unit in printed["units"]] == [
        (IDS[2], "nan", "non_finite")
    ]
