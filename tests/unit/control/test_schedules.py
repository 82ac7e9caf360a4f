import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.schedules import value_at
from tests.references.control_reference import at, budget_at

STEPS = st.integers(0, 12) | st.integers(0, 200)  # few, to meet a schedule's own steps too


@pytest.mark.parametrize(
    ("step", "value"), [(0, 4.0), (10, 4.0), (15, 3.0), (20, 2.0), (25, 2.5), (30, 3.0), (99, 3.0)]
)
def test_a_schedule_is_linear_between_its_steps_and_constant_outside(step, value):
    assert value_at({30: 3.0, 10: 4.0, 20: 2.0}, step) == value


def test_a_constant_is_its_own_schedule():
    assert value_at(3, 1000) == 3.0


@given(st.dictionaries(STEPS, st.floats(0.1, 10.0), min_size=1), STEPS)
@settings(deadline=None)
def test_a_schedule_equals_the_reference_and_stays_within_its_values(schedule, step):
    value = value_at(schedule, step)
    assert value == at(schedule, step)
    assert min(schedule.values()) <= value * (1 + 1e-15)
    assert value * (1 - 1e-15) <= max(schedule.values())


@given(st.dictionaries(STEPS, st.integers(0, 5000), min_size=1), STEPS)
@settings(deadline=None)
def test_a_scheduled_budget_is_the_exact_fraction_rounded_down(schedule, step):
    assert int(value_at(schedule, step)) == budget_at(schedule, step)


@pytest.mark.parametrize(("last", "step"), [(22, 15), (23, 13), (39, 31)])
def test_a_whole_number_between_two_steps_stays_whole(last, step):
    # 15 / 22 * 22 is 14.999…, which would lose a unit of the budget
    assert value_at({0: 0, last: last}, step) == step


def test_the_reference_rounds_down_what_lies_between_two_whole_numbers():
    assert budget_at({0: 0, 3: 2}, 1) == math.floor(Fraction(2, 3)) == 0
