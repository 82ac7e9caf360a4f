import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller, DisabledController
from gnmr_megatron.control.units import Unit, UnitTable
from tests.references.control_reference import ReferenceController

NORMS = st.one_of(
    st.floats(1e-30, 1e30),
    st.floats(0.5, 2.0),
    st.sampled_from([0.0, 1.0, 1.0, 3.0, math.inf, -math.inf, math.nan, 1e-300]),
)
SCHEDULES = st.floats(0.5, 4.0) | st.dictionaries(
    st.integers(0, 30), st.floats(0.5, 4.0), min_size=1, max_size=3
)
SETTINGS = st.fixed_dictionaries(
    {
        "alpha": SCHEDULES,
        "beta": SCHEDULES,
        "delta": st.integers(1, 4),
        "max_recovered": st.integers(0, 4)
        | st.dictionaries(st.integers(0, 30), st.integers(0, 4), min_size=1, max_size=3),
        "lock_steps": st.integers(0, 3),
        "warmup_steps": st.integers(0, 4),
        "collapse_ratio": st.none() | st.floats(0.05, 0.9),
        "mean": st.sampled_from(["cumulative", "ema", "window"]),
        "ema_decay": st.floats(0.1, 0.99),
        "window": st.integers(1, 5),
    }
)
POLICIES = [
    "gnmr",
    "static_low",
    "static_high",
    "first_last_k",
    "random",
    "round_robin",
    "top_norm",
    "ema_ratio",
    "zscore",
]


def units(count):
    return UnitTable(
        Unit(i // 4, i % 4, f"decoder.layers.{i // 4}.linear_{i % 4}", (8, 8)) for i in range(count)
    )


@st.composite
def traces(draw):
    count = draw(st.integers(1, 6))
    norms = draw(st.lists(st.lists(NORMS, min_size=count, max_size=count), min_size=1, max_size=30))
    updated = draw(
        st.lists(st.booleans() | st.just(True), min_size=len(norms), max_size=len(norms))
    )
    return count, norms, updated


def run(controller, norms, updated, first=1):
    return [
        controller.decide(np.array(row), step=step, updated=flag)
        for step, (row, flag) in enumerate(zip(norms, updated, strict=True), start=first)
    ]


@given(trace=traces(), config=SETTINGS)
@settings(max_examples=150, deadline=None)
def test_decisions_equal_the_slow_reference(trace, config):
    count, norms, updated = trace
    reference = ReferenceController(count, config)
    with np.errstate(all="raise", under="ignore"):
        decisions = run(Controller(ControlConfig(**config), units(count)), norms, updated)
    for step, decision in enumerate(decisions, start=1):
        expected = reference.decide(norms[step - 1], step=step, updated=updated[step - 1])
        np.testing.assert_array_equal(decision.gnmr, expected["gnmr"])
        np.testing.assert_array_equal(decision.delta_gnmr, expected["delta_gnmr"])
        np.testing.assert_array_equal(decision.score, expected["score"])
        assert decision.selected.tolist() == expected["selected"]
        assert decision.lock.tolist() == expected["lock"]


@given(trace=traces(), config=SETTINGS, policy=st.sampled_from(POLICIES))
@settings(max_examples=100, deadline=None)
def test_the_budget_is_never_exceeded_and_scores_are_never_nan(trace, config, policy):
    count, norms, updated = trace
    controller = Controller(ControlConfig(**config, policy=policy), units(count))
    for decision in run(controller, norms, updated):
        assert not np.isnan(decision.score).any()
        assert len(set(decision.selected.tolist())) == len(decision.selected)
        if policy != "static_high":
            assert len(decision.selected) <= decision.max_recovered


@given(trace=traces(), config=SETTINGS, policy=st.sampled_from(POLICIES), cut=st.integers(0, 30))
@settings(max_examples=80, deadline=None)
def test_a_controller_resumed_from_json_goes_on_alike(trace, config, policy, cut):
    count, norms, updated = trace
    cut = min(cut, len(norms))
    whole = Controller(ControlConfig(**config, policy=policy), units(count))
    expected = run(whole, norms, updated)
    first = Controller(ControlConfig(**config, policy=policy), units(count))
    run(first, norms[:cut], updated[:cut])
    second = Controller(ControlConfig(**config, policy=policy), units(count))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.recovery_set.tolist() == first.recovery_set.tolist()
    resumed = run(second, norms[cut:], updated[cut:], first=cut + 1)
    for ours, theirs in zip(resumed, expected[cut:], strict=True):
        assert ours.fingerprint == theirs.fingerprint
        np.testing.assert_array_equal(ours.score, theirs.score)
        np.testing.assert_array_equal(ours.lock, theirs.lock)


def steady(count=4, **changes):
    config = {
        "alpha": 3.0,
        "beta": 2.0,
        "delta": 2,
        "max_recovered": 2,
        "lock_steps": 3,
        "warmup_steps": 0,
    }
    controller = Controller(ControlConfig(**{**config, **changes}), units(count))
    run(controller, [[1.0] * count] * 10, [True] * 10)
    return controller


def test_an_isolated_event_recovers_a_unit_for_one_and_lock_steps():
    controller = steady()
    recovered = [controller.decide(np.array([1.0, 9.0, 1.0, 1.0]), step=11).recovery_set.tolist()]
    recovered += [
        controller.decide(np.ones(4), step=step).recovery_set.tolist() for step in range(12, 20)
    ]
    assert recovered == [[1]] * 4 + [[]] * 5


def test_the_riskiest_candidates_win_and_ties_go_to_the_earlier_unit():
    assert steady().decide(np.array([9.0, 12.0, 9.0, 9.0]), step=11).selected.tolist() == [1, 0]


def test_a_skipped_step_leaves_no_trace_in_the_history():
    with_skip, without = steady(), steady()
    with_skip.decide(np.array([50.0, 1.0, 1.0, 1.0]), step=11, updated=False)
    ours = with_skip.decide(np.full(4, 2.0), step=12)
    theirs = without.decide(np.full(4, 2.0), step=12)
    np.testing.assert_array_equal(ours.gnmr, theirs.gnmr)
    np.testing.assert_array_equal(ours.delta_gnmr, theirs.delta_gnmr)


def test_monitor_decides_alike_and_recovers_nothing():
    active, monitor = steady(), steady(mode="monitor")
    norms = np.array([1.0, 9.0, 1.0, 1.0])
    ours, theirs = monitor.decide(norms, step=11), active.decide(norms, step=11)
    assert ours.selected.tolist() == theirs.selected.tolist() == [1]
    assert ours.recovery_set.tolist() == []
    assert monitor.recovery_set.tolist() == []


def test_a_restarted_history_warms_up_again_and_forgets_locks():
    controller = steady(warmup_steps=3)
    controller.decide(np.array([1.0, 9.0, 1.0, 1.0]), step=11)
    controller.restart_history()
    selected = [
        controller.decide(np.array([1.0, 9.0**n, 1.0, 1.0]), step=12 + n).selected.tolist()
        for n in range(4)
    ]
    assert selected == [[], [], [], [1]]


@pytest.mark.parametrize(
    ("norm", "changes", "reason"),
    [
        (9.0, {"beta": 100.0}, "gnmr"),
        (2.5, {"alpha": 100.0}, "delta_gnmr"),
        (math.nan, {}, "non_finite"),
        (0.01, {"collapse_ratio": 0.1, "beta": 100.0}, "collapse"),
    ],
)
def test_a_decision_names_its_reason(norm, changes, reason):
    controller = steady(**changes)
    assert controller.decide(np.array([1.0, norm, 1.0, 1.0]), step=11).reason(1) == reason
    assert controller.decide(np.ones(4), step=12).reason(1) == "lock"


def test_decisions_stay_as_they_were_when_later_steps_and_callers_change_arrays():
    controller, norms = steady(), np.array([1.0, 9.0, 1.0, 1.0])
    decision = controller.decide(norms, step=11)
    before = (decision.lock.tolist(), decision.gnmr.tolist())
    state = controller.state_dict()
    frozen = json.dumps(state)
    norms[:] = 77.0
    controller.decide(np.full(4, 5.0), step=12)
    assert (decision.lock.tolist(), decision.gnmr.tolist()) == before
    assert json.dumps(state) == frozen


def test_decisions_that_differ_have_different_fingerprints():
    one, other = (
        steady().decide(np.array(norms), step=11)
        for norms in ([1.0, 9.0, 1.0, 1.0], [9.0, 1.0, 1.0, 1.0])
    )
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == steady().decide(np.array([1.0, 9.0, 1.0, 1.0]), step=11).fingerprint


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: steady(count=3),
            r"has 4 units, this model 3; only saved: \['decoder.layers.0.linear_3'\]",
        ),
        (lambda: steady(policy="zscore"), "the saved policy is gnmr, gnmr.policy is zscore"),
        (
            lambda: steady(delta=5),
            r"history `recent` has shape \(2, 4\), the settings ask for \(5, 4\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_what_differs(other, message):
    with pytest.raises(ValueError, match=message):
        other().load_state_dict(steady().state_dict())


def test_norms_of_another_number_of_units_are_refused():
    with pytest.raises(ValueError, match=r"got norms of shape \(3,\) for 4 units"):
        steady().decide(np.ones(3), step=11)


def test_a_disabled_controller_recovers_nothing():
    controller = DisabledController(units(4))
    assert controller.decide(np.zeros(0), step=1).recovery_set.tolist() == []
    assert controller.state_dict() == {}
