import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller, DisabledController
from gnmr_megatron.control.units import Unit, UnitTable
from tests.unit.control.strategies import (
    MEANS,
    PATHS_DO_NOT_MATTER,
    POLICIES,
    SETTINGS,
    STEADY,
    TRACES,
    bits,
    make,
    run,
    units,
)


def through_json(state):
    return json.loads(json.dumps(state))


def warm(count=4, *, norms=None, **changes):
    """A controller after ten steps of norm 1 and, where given, one of other norms."""
    config = {"delta": 2, "max_recovered": 3, "lock_steps": 3, "warmup_steps": 0}
    controller = make(count, config, **changes)
    run(controller, [[1.0] * count] * 10 + ([norms] if norms else []))
    return controller


@given(TRACES, SETTINGS, st.sampled_from(POLICIES), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_controller_resumed_from_json_goes_on_to_the_bit(trace, config, policy, share):
    count, norms, updated = trace
    cut = round(share * len(norms))
    expected = run(make(count, config, policy=policy), norms, updated)
    first, second = (make(count, config, policy=policy) for _ in range(2))
    run(first, norms[:cut], updated[:cut])
    second.load_state_dict(through_json(first.state_dict()))
    assert second.recovery_set.tolist() == first.recovery_set.tolist()
    # as text, since NaN, "no average yet", does not equal itself
    assert json.dumps(second.state_dict()) == json.dumps(first.state_dict())
    resumed = run(second, norms[cut:], updated[cut:], first=cut + 1)
    assert [bits(ours) for ours in resumed] == [bits(theirs) for theirs in expected[cut:]]


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_mean_resumes_at_every_step(policy, mean):
    config = {"policy": policy, "mean": mean, "window": 3, "warmup_steps": 2, "max_recovered": 2}
    norms = np.random.default_rng(5).lognormal(sigma=1.0, size=(14, 5)).tolist()
    expected = run(make(5, config), norms)
    controller = make(5, config)
    for step, row in enumerate(norms, start=1):
        resumed = make(5, config)
        resumed.load_state_dict(through_json(controller.state_dict()))
        controller = resumed
        decision = controller.decide(np.array(row), step=step)
        assert bits(decision) == bits(expected[step - 1])


def test_a_state_does_not_follow_its_controller_nor_the_controller_its_state():
    controller = warm(norms=[9.0, 1.0, 1.0, 1.0], mean="window", window=4)
    state = controller.state_dict()
    text = json.dumps(state)
    other = warm(mean="window", window=4)
    other.load_state_dict(state)
    run(controller, [[5.0] * 4] * 3, first=12)
    assert json.dumps(state) == text
    for values in (state["lock"], state["recovery_set"], *state["history"].values()):
        values.clear()
    assert json.dumps(other.state_dict()) == text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: warm(count=3),
            r"has 4 units, this model 3; only saved: \['decoder.layers.0.linear_3'\], only here: \[\]",
        ),
        (lambda: warm(policy="zscore"), "the saved policy is gnmr, gnmr.policy is zscore"),
        (lambda: warm(mean="ema"), "the saved mean is cumulative, gnmr.mean is ema"),
        (lambda: warm(mean="window"), "the saved mean is cumulative, gnmr.mean is window"),
        (
            lambda: warm(delta=5),
            r"history `recent` has shape \(2, 4\), the settings ask for \(5, 4\)",
        ),
    ],
    ids=["units", "policy", "mean", "window", "delta"],
)
def test_a_state_that_does_not_fit_is_refused_with_what_differs(other, message):
    refusing = other()
    before = json.dumps(refusing.state_dict())
    with pytest.raises(ValueError, match=message):
        refusing.load_state_dict(warm(norms=[9.0, 1.0, 1.0, 1.0]).state_dict())
    assert json.dumps(refusing.state_dict()) == before


def test_another_window_is_refused_with_both_sizes():
    state = warm(mean="window", window=4).state_dict()
    with pytest.raises(
        ValueError, match=r"`past` has shape \(4, 4\), the settings ask for \(6, 4\)"
    ):
        warm(mean="window", window=6).load_state_dict(state)


def test_the_same_units_in_another_order_are_refused_with_the_first_that_differs():
    one, other = (
        Controller(
            ControlConfig(), UnitTable(Unit(0, place, name, (1, 1)) for place, name in pairs)
        )
        for pairs in ([(0, "a"), (1, "b"), (2, "c")], [(0, "a"), (1, "c"), (2, "b")])
    )
    with pytest.raises(ValueError, match="unit 1 of the saved controller is b, here c"):
        other.load_state_dict(one.state_dict())


def test_a_smaller_budget_holds_from_the_first_step_after_resuming():
    saved = warm(norms=[7.0, 9.0, 8.0, 1.0])
    assert saved.recovery_set.tolist() == [1, 2, 0]
    for budget in (2, {0: 2, 11: 1, 100: 3}, 0):
        resumed = make(4, {"delta": 2, "max_recovered": budget})
        resumed.load_state_dict(through_json(saved.state_dict()))
        most = budget if isinstance(budget, int) else 1
        assert resumed.recovery_set.tolist() == [1, 2, 0][:most]


def test_monitor_mode_holds_from_the_first_step_after_resuming():
    resumed = warm(mode="monitor")
    resumed.load_state_dict(warm(norms=[7.0, 9.0, 8.0, 1.0]).state_dict())
    assert resumed.recovery_set.tolist() == []


@given(TRACES, SETTINGS, st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_after_a_restart_the_controller_decides_like_a_new_one(trace, config, policy):
    count, norms, updated = trace
    config = {**config, **PATHS_DO_NOT_MATTER}
    controller = make(count, config, policy=policy)
    run(controller, norms, updated)
    controller.restart_history()
    fresh = make(count, config, policy=policy)
    restarted = run(controller, norms, updated, first=len(norms) + 1)
    expected = run(fresh, norms, updated, first=len(norms) + 1)
    assert [bits(ours) for ours in restarted] == [bits(theirs) for theirs in expected]


def test_a_restarted_history_warms_up_again_and_forgets_locks():
    controller = warm(warmup_steps=3, norms=[1.0, 9.0, 1.0, 1.0])
    assert controller.recovery_set.tolist() == [1]
    controller.restart_history()
    rows = [[1.0, 9.0**n, 1.0, 1.0] for n in range(4)]
    decisions = run(controller, rows, first=12)
    assert [decision.selected.tolist() for decision in decisions] == [[], [], [], [1]]
    assert [decision.lock[1] for decision in decisions] == [0, 0, 0, 3]


def test_a_disabled_controller_recovers_nothing_and_has_no_state():
    controller = DisabledController(units(4))
    decision = controller.decide(np.array([math.nan] * 4), step=3, updated=False)
    assert (decision.step, decision.updated, decision.max_recovered) == (3, False, 0)
    assert decision.selected.tolist() == decision.recovery_set.tolist() == []
    controller.load_state_dict(through_json(controller.state_dict()))
    assert controller.state_dict() == {}
    assert controller.recovery_set.tolist() == []


def test_each_path_has_a_mean_of_its_own_and_the_state_says_which():
    """A norm that is four times as large on the recovery path is no departure there."""
    changes = {
        "history": "per_path",
        "alpha": 3.0,
        "lock_steps": 4,
        "delta": 50,
        "max_recovered": 1,
    }
    controller = make(1, STEADY, **changes)
    run(controller, [[1.0]] * 5 + [[8.0]])  # risky: recovered from step 7 on, for five steps
    decisions = run(controller, [[4.0], [4.0], [8.0]], first=7)
    assert [float(decision.gnmr[0]) for decision in decisions] == [1.0, 1.0, 2.0]
    shared = make(1, STEADY, **{**changes, "history": "shared"})
    run(shared, [[1.0]] * 5 + [[8.0]])
    assert run(shared, [[4.0]], first=7)[0].gnmr[0] == 4.0 / (13.0 / 6.0)
    with pytest.raises(ValueError, match="the saved history has a mean for each path"):
        shared.load_state_dict(controller.state_dict())


def test_a_step_on_another_path_than_the_one_before_is_not_remembered_unless_asked_for():
    changes = {"fold_switches": False, "lock_steps": 1, "delta": 50, "max_recovered": 1}
    controller = make(1, STEADY, **changes)
    run(controller, [[1.0]] * 4)
    run(controller, [[8.0]], first=5)  # 4 x 1 and 8: the mean is 12 / 5
    run(controller, [[100.0]], first=6)  # switched: left out
    (decision,) = run(controller, [[12.0]], first=7)
    assert decision.gnmr[0] == 12.0 / (12.0 / 5.0)
