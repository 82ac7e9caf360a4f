"""The worked example of the exact semantics, against the slow reference and against what the page says of it."""

import math

import numpy as np
import pytest

from docs.generator.worked_example import SETTINGS, STEPS, UNITS, decisions, render
from tests.references.control_reference import ReferenceController

A, B, C = range(3)


@pytest.fixture(scope="module")
def decided():
    return {decision.step: decision for decision in decisions()}


def test_the_numbers_are_those_of_the_slow_reference(decided):
    reference = ReferenceController(len(UNITS), SETTINGS)
    for step, (norms, updated) in enumerate(STEPS, start=1):
        expected, decision = reference.decide(norms, step=step, updated=updated), decided[step]
        for key in ("selected", "recovery_set", "gnmr", "delta_gnmr", "score", "lock"):
            np.testing.assert_array_equal(
                getattr(decision, key), expected[key], err_msg=f"{step} {key}"
            )


def test_what_the_page_tells_of_its_steps_is_so(decided):
    chosen = {step: decision.selected.tolist() for step, decision in decided.items()}
    assert [chosen[step] for step in (3, 5, 6, 7, 9, 10)] == [[], [B], [A], [B], [C], [C]]
    assert decided[3].gnmr[A] == 9
    assert decided[4].gnmr[A] == pytest.approx(3 / (11 / 3))
    assert (decided[5].gnmr[B], decided[5].delta_gnmr[B], decided[5].score[B]) == (4, 4, 4 / 1.5)
    assert decided[5].lock[B] == 2
    assert decided[6].score[A] == math.inf
    assert decided[6].lock[B] == 1
    assert decided[7].candidate.tolist() == [True, True, False]
    assert decided[7].score[B] > decided[7].score[A]
    assert decided[7].lock[B] == 0
    assert (decided[9].delta_gnmr[C], decided[9].gnmr[C]) == (math.inf, pytest.approx(0.7))
    assert (decided[10].score[[A, C]] > 1).all()
    assert decided[10].score[[A, C]].round(1).tolist() == [6.1, 22.2]
    assert decided[10].lock[A] == 0


def test_the_table_has_a_row_for_each_step():
    rows = render().splitlines()[2:]
    assert len(rows) == len(STEPS)
    assert rows[5].startswith("| 6 (skipped) | nan, 1, 1 | inf, 0.625, 1 |")
