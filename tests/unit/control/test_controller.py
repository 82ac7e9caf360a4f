import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable
from tests.unit.control.strategies import (
    CLOSED_LOOP,
    MEANS,
    OPEN_LOOP,
    PATHS_DO_NOT_MATTER,
    POLICIES,
    SETTINGS,
    STEADY,
    TRACES,
    bits,
    make,
    run,
    steady,
    units,
)


@given(TRACES, SETTINGS, st.sampled_from(POLICIES))
@settings(max_examples=120, deadline=None)
def test_the_budget_is_never_exceeded_and_nothing_is_nan(trace, config, policy):
    count, norms, updated = trace
    controller = make(count, config, policy=policy)
    with np.errstate(all="raise"):
        decisions = run(controller, norms, updated)
    for decision in decisions:
        for name in ("gnmr", "delta_gnmr", "score"):
            values = getattr(decision, name)
            assert values.dtype == np.float64
            assert (values >= 0).all(), "NaN or negative"
        selected = decision.selected.tolist()
        assert len(set(selected)) == len(selected)
        assert set(selected) <= set(np.flatnonzero(decision.candidate).tolist())
        assert ((decision.lock >= 0) & (decision.lock <= config["lock_steps"])).all()
        if policy == "static_high":
            assert selected == list(range(count))
        else:
            assert len(selected) <= decision.max_recovered
        left_out = set(np.flatnonzero(decision.candidate).tolist()) - set(selected)
        if left_out and selected:
            assert decision.score[list(left_out)].max() <= decision.score[selected].min()


@given(TRACES, SETTINGS, st.sampled_from(OPEN_LOOP))
@settings(max_examples=60, deadline=None)
def test_the_first_recovery_set_is_within_the_budget_too(trace, config, policy):
    controller = make(trace[0], config, policy=policy)
    budget = config["max_recovered"]
    most = budget if isinstance(budget, int) else budget[min(budget)]
    if config["mode"] == "monitor":
        assert len(controller.recovery_set) == 0
    elif policy == "static_high":
        assert controller.recovery_set.tolist() == list(range(trace[0]))
    else:
        assert len(controller.recovery_set) <= most


@given(TRACES, SETTINGS, st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_two_controllers_decide_the_same_bits(trace, config, policy):
    count, norms, updated = trace
    one, other = (run(make(count, config, policy=policy), norms, updated) for _ in range(2))
    assert [bits(decision) for decision in one] == [bits(decision) for decision in other]


@given(TRACES, SETTINGS, st.sampled_from(CLOSED_LOOP))
@settings(max_examples=60, deadline=None)
def test_nothing_is_recovered_in_warm_up(trace, config, policy):
    count, norms, updated = trace
    controller = make(count, config, policy=policy)
    assert controller.recovery_set.tolist() == []
    for decision in run(controller, norms, updated)[: config["warmup_steps"]]:
        assert decision.selected.tolist() == []
        assert decision.recovery_set.tolist() == []
        assert not decision.candidate.any()
        assert not decision.lock.any()


@given(TRACES, SETTINGS, st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_monitor_decides_alike_and_recovers_nothing(trace, config, policy):
    count, norms, updated = trace
    config = {**config, **PATHS_DO_NOT_MATTER}
    active, monitor = (
        make(count, config, policy=policy, mode=mode) for mode in ("active", "monitor")
    )
    for ours, theirs in zip(run(monitor, norms, updated), run(active, norms, updated), strict=True):
        assert ours.recovery_set.tolist() == []
        assert theirs.recovery_set.tolist() == theirs.selected.tolist()
        assert {**bits(ours), "recovery_set": b""} == {**bits(theirs), "recovery_set": b""}
        assert (ours.fingerprint != theirs.fingerprint) == (len(theirs.selected) > 0)
    assert monitor.recovery_set.tolist() == []


@given(st.integers(1, 60), st.integers(2, 10), st.randoms(), st.sampled_from(CLOSED_LOOP))
@settings(max_examples=40, deadline=None)
def test_without_ties_the_order_of_the_units_does_not_matter(steps, count, random, policy):
    order = list(range(count))
    random.shuffle(order)
    norms = np.random.default_rng(random.randrange(2**32)).lognormal(sigma=0.7, size=(steps, count))
    table = units(count)
    shuffled = UnitTable(Unit(0, place, table.ids[i], (8, 8)) for place, i in enumerate(order))
    config = make(count, STEADY, alpha=1.5, beta=1.2, policy=policy, warmup_steps=2).config
    one, other = Controller(config, table), Controller(config, shuffled)
    for step, row in enumerate(norms, start=1):
        ours, theirs = one.decide(row, step=step), other.decide(row[order], step=step)
        assert ours.gnmr[order].tolist() == theirs.gnmr.tolist()
        # z-scores below the mean are all 0, so locked units may tie
        if policy != "zscore":
            assert [order[index] for index in theirs.selected] == ours.selected.tolist()


@given(st.integers(0, 8), st.sampled_from(MEANS), st.floats(4.0, 1e6) | st.just(math.nan))
@settings(max_examples=40, deadline=None)
def test_an_isolated_event_recovers_a_unit_for_one_and_lock_steps(lock_steps, mean, spike):
    controller = steady(lock_steps=lock_steps, mean=mean)
    rows = [[1.0, spike, 1.0, 1.0]] + [[1.0] * 4] * (lock_steps + 5)
    sets = [decision.recovery_set.tolist() for decision in run(controller, rows, first=11)]
    assert sets == [[1]] * (1 + lock_steps) + [[]] * 5


def test_a_risky_unit_that_is_left_out_gets_no_lock_and_a_locked_one_counts_down_unselected():
    controller = steady(max_recovered=1)
    first = controller.decide(np.array([8.0, 9.0, 1.0, 1.0]), step=11)
    assert (first.selected.tolist(), first.lock.tolist()) == ([1], [0, 3, 0, 0])
    # unit 2 takes the place; unit 1 is still locked, a candidate, and loses
    second = controller.decide(np.array([1.0, 1.0, 9.0, 1.0]), step=12)
    assert (second.selected.tolist(), second.lock.tolist()) == ([2], [0, 2, 3, 0])
    assert second.candidate.tolist() == [False, True, True, False]


def test_another_event_under_lock_starts_the_lock_anew():
    controller = steady()
    rows = [[9.0, 1.0, 1.0, 1.0]] + [[1.0] * 4] * 2 + [[60.0, 1.0, 1.0, 1.0]] + [[1.0] * 4] * 5
    locks = [decision.lock[0] for decision in run(controller, rows, first=11)]
    assert locks == [3, 2, 1, 3, 2, 1, 0, 0, 0]


def test_the_riskiest_candidates_win_and_ties_go_to_the_earlier_unit():
    assert steady().decide(np.array([9.0, 12.0, 9.0, 9.0]), step=11).selected.tolist() == [1, 0]
    odd = np.array([1.0, math.inf, math.nan, -math.inf])
    assert steady().decide(odd, step=11).selected.tolist() == [1, 2]


def test_a_score_of_exactly_one_is_not_risky():
    norms = np.array([3.0, np.nextafter(3.0, 4.0), 1.0, 1.0])
    decision = steady(beta=100.0).decide(norms, step=11)
    assert decision.score[0] == 1.0
    assert decision.selected.tolist() == [1]


@pytest.mark.parametrize(
    ("norm", "selected"), [(1.0, [1]), (1e-300, [1]), (0.0, [])], ids=["back", "barely", "dead"]
)
def test_a_dead_gradient_that_returns_is_risky(norm, selected):
    controller = steady()
    run(controller, [[1.0, 0.0, 1.0, 1.0]] * 2, first=11)
    decision = controller.decide(np.array([1.0, norm, 1.0, 1.0]), step=13)
    assert decision.delta_gnmr[1] == (math.inf if selected else 1.0)
    assert decision.selected.tolist() == selected


def test_a_unit_that_was_zero_from_the_start_has_a_gnmr_of_one_until_it_has_a_mean():
    # LoRA starts so: the gradient of A is zero while B is
    decisions = run(make(1, STEADY, warmup_steps=0), [[0.0], [0.0], [2.0], [2.0]])
    assert [decision.gnmr[0] for decision in decisions] == [1.0, 1.0, 1.0, 3.0]


def without_counters(controller):
    state = controller.state_dict()
    return json.dumps([state["history"], state["policy_state"]])


@given(TRACES, SETTINGS, st.sampled_from(POLICIES), TRACES)
@settings(max_examples=60, deadline=None)
def test_a_skipped_step_leaves_no_trace_in_any_history(trace, config, policy, others):
    count, norms, updated = trace
    controller = make(count, config, policy=policy)
    run(controller, norms, updated)
    before = without_counters(controller)
    row = np.resize(np.array(others[1][0]), count)
    controller.decide(row, step=len(norms) + 1, updated=False)
    assert without_counters(controller) == before


@given(
    TRACES, SETTINGS, st.sampled_from(POLICIES), st.sampled_from([math.nan, math.inf, -math.inf])
)
@settings(max_examples=60, deadline=None)
def test_a_norm_that_is_not_finite_leaves_no_trace_and_the_others_are_folded(
    trace, config, policy, odd
):
    count, norms, updated = trace
    hit, missed = (make(count, config, policy=policy) for _ in range(2))
    run(hit, norms, updated)
    run(missed, norms, updated)
    row = np.full(count, 2.0)
    missed.decide(row, step=len(norms) + 1)
    before, row[0] = hit.state_dict(), odd
    hit.decide(row, step=len(norms) + 1)
    for kind in ("history", "policy_state"):
        for name, values in hit.state_dict()[kind].items():
            own, rest = np.atleast_1d(values)[..., :1], np.atleast_1d(values)[..., 1:]
            np.testing.assert_array_equal(own, np.array(before[kind][name])[..., :1])
            np.testing.assert_array_equal(rest, np.array(missed.state_dict()[kind][name])[..., 1:])


def test_norms_that_change_after_the_decision_do_not_change_the_history():
    for mean, policy in itertools.product(MEANS, CLOSED_LOOP):
        one, other = (steady(mean=mean, policy=policy) for _ in range(2))
        norms = np.array([1.0, 9.0, 1.0, 1.0])
        one.decide(norms, step=11)
        norms[:] = math.nan
        other.decide(np.array([1.0, 9.0, 1.0, 1.0]), step=11)
        assert without_counters(one) == without_counters(other)


def test_norms_of_lower_precision_are_taken_as_float64():
    rows = np.random.default_rng(0).lognormal(size=(20, 3)).astype(np.float32)
    one, other = (make(3, STEADY, alpha=1.5) for _ in range(2))
    for step, row in enumerate(rows, start=1):
        ours = one.decide(row, step=step)  # type: ignore[arg-type]  # what a caller may do
        assert bits(ours) == bits(other.decide(row.astype(np.float64), step=step))


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), ()])
def test_norms_of_another_number_of_units_are_refused(shape):
    with pytest.raises(ValueError, match=r"got norms of shape \(.*\) for 4 units"):
        steady().decide(np.ones(shape), step=11)


def test_a_model_without_units_decides_nothing():
    for policy in POLICIES:
        controller = make(0, {"policy": policy, "warmup_steps": 0})
        assert controller.decide(np.zeros(0), step=1).selected.tolist() == []
