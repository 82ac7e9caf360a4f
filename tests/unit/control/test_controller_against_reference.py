"""The controller and the slow reference decide alike, to the last bit.

Both do the same additions, products and quotients of float64 in the same order, so that equality is exact.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references.control_reference import ReferenceController, ema_ratio_score, zscore_score
from tests.unit.control.strategies import SETTINGS, TRACES, make, run


@given(TRACES, SETTINGS)
@settings(max_examples=150, deadline=None)
def test_decisions_equal_the_slow_reference(trace, config):
    count, norms, updated = trace
    reference, controller = ReferenceController(count, config), make(count, config)
    with np.errstate(all="raise"):
        decisions = run(controller, norms, updated)
    for step, decision in enumerate(decisions, start=1):
        expected = reference.decide(norms[step - 1], step=step, updated=updated[step - 1])
        for name, values in expected.items():
            np.testing.assert_array_equal(getattr(decision, name), values, err_msg=name)
    assert controller.recovery_set.tolist() == expected["recovery_set"]


@pytest.mark.parametrize(
    ("policy", "score"), [("ema_ratio", ema_ratio_score), ("zscore", zscore_score)]
)
@given(trace=TRACES, alpha=st.floats(0.01, 4.0), decay=st.floats(0.1, 0.99))
@settings(max_examples=60, deadline=None)
def test_scores_of_moving_averages_equal_the_slow_reference(policy, score, trace, alpha, decay):
    count, norms, updated = trace
    controller = make(count, {"policy": policy, "alpha": alpha, "ema_decay": decay})
    with np.errstate(all="raise"):
        decisions = run(controller, norms, updated)
    for unit in range(count):
        past = []
        for row, flag, decision in zip(norms, updated, decisions, strict=True):
            expected = score(past, row[unit], alpha=alpha, decay=decay)
            assert decision.score[unit] == expected
            if flag and math.isfinite(row[unit]):
                past.append(row[unit])
