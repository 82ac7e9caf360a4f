import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.selection import select_recovery_set

# few different scores, so that ties are common
ROWS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e300, math.inf]) | st.floats(0, 3), st.booleans()
    )
)


def select(rows, budget):
    scores = np.array([score for score, _ in rows], dtype=np.float64)
    candidate = np.array([flag for _, flag in rows], dtype=np.bool_)
    return select_recovery_set(scores, candidate, budget)


@given(ROWS, st.integers(0, 20))
@settings(deadline=None)
def test_the_riskiest_candidates_are_selected_and_the_earlier_unit_wins_a_tie(rows, budget):
    ranked = sorted(
        (index for index, (_, is_candidate) in enumerate(rows) if is_candidate),
        key=lambda index: (-rows[index][0], index),
    )
    selected = select(rows, budget)
    assert selected.dtype == np.int64
    assert selected.tolist() == ranked[:budget]


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=20, unique=True), st.randoms())
@settings(deadline=None)
def test_without_ties_the_order_of_the_units_does_not_matter(scores, random):
    order = list(range(len(scores)))
    random.shuffle(order)
    rows = [(score, True) for score in scores]
    shuffled = select([rows[index] for index in order], 5)
    assert [order[index] for index in shuffled] == select(rows, 5).tolist()


@pytest.mark.parametrize("budget", [0, 3, 100])
def test_equal_scores_are_taken_in_the_order_of_the_units(budget):
    # more than 16 units: NumPy's default sort is stable below that
    assert select([(2.0, True)] * 50, budget).tolist() == list(range(min(budget, 50)))
