import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.strategies import POLICIES, SETTINGS, TRACES, bits, make, run, steady


@pytest.mark.parametrize(
    ("norm", "changes", "reason"),
    [
        (9.0, {"beta": 100.0}, "gnmr"),
        (2.5, {"alpha": 100.0}, "delta_gnmr"),
        (math.nan, {}, "non_finite"),
        (math.inf, {"collapse_ratio": 0.1}, "non_finite"),
        (0.01, {"collapse_ratio": 0.1, "beta": 100.0}, "collapse"),
        (0.0, {"collapse_ratio": 0.1, "beta": 100.0}, "collapse"),
        (9.0, {"policy": "ema_ratio"}, "policy"),
        (math.nan, {"policy": "ema_ratio"}, "non_finite"),
    ],
)
def test_a_decision_names_its_reason(norm, changes, reason):
    controller = steady(**changes)
    assert controller.decide(np.array([1.0, norm, 1.0, 1.0]), step=11).reason(1) == reason
    assert controller.decide(np.ones(4), step=12).reason(1) == "lock"


@pytest.mark.parametrize("policy", ["top_norm", "static_high", "random", "round_robin"])
def test_only_the_collapse_rule_gives_collapse_as_a_reason(policy):
    # a shrinking norm has a GNMR below 1, but that is not why these policies took the unit
    decision = steady(policy=policy, collapse_ratio=0.9).decide(np.full(4, 0.1), step=11)
    assert {decision.reason(unit) for unit in decision.selected} == {"policy"}


def test_a_returning_gradient_has_its_sudden_change_as_the_reason():
    controller = steady(collapse_ratio=0.1)
    run(controller, [[1.0, 0.0, 1.0, 1.0]] * 2, first=11)
    assert controller.decide(np.ones(4), step=13).reason(1) == "delta_gnmr"


def test_decisions_cannot_be_written_to_and_do_not_follow_the_callers_norms():
    for policy in POLICIES:
        controller, norms = steady(policy=policy), np.array([1.0, 9.0, 1.0, 1.0])
        decision = controller.decide(norms, step=11)
        before = bits(decision)
        norms[:] = 77.0
        run(controller, [[5.0] * 4] * 3, first=12)
        assert bits(decision) == before
        for value in vars(decision).values():
            if isinstance(value, np.ndarray) and value.size:
                with pytest.raises(ValueError, match="read-only"):
                    value[0] = 1


@given(TRACES, SETTINGS, st.sampled_from(POLICIES))
@settings(max_examples=40, deadline=None)
def test_fingerprints_differ_exactly_where_decisions_differ(trace, config, policy):
    count, norms, updated = trace
    decisions = run(make(count, config, policy=policy), norms, updated)
    decisions += run(make(count, config, policy=policy, lock_steps=1), norms, updated)
    decisions += run(make(count, config, policy=policy, mode="monitor"), norms, updated)
    seen = {}
    for one in decisions:
        key = (one.step, tuple(one.selected.tolist()), tuple(one.recovery_set.tolist()))
        seen.setdefault(key, set()).add(one.fingerprint)
    assert all(len(prints) == 1 for prints in seen.values())
    assert len(set.union(*seen.values())) == len(seen)
    assert {len(one.fingerprint) for one in decisions} == {8}
