import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.policies import build_policy
from gnmr_megatron.control.schedules import sum_before, value_at
from tests.unit.control.strategies import POLICIES, SETTINGS, TRACES, make, run, units


def controller(policy, count=12, recorded=None, **changes):
    settings = {"warmup_steps": 0, "max_recovered": 3, "alpha": 2.0, **changes}
    return Controller(ControlConfig(policy=policy, **settings), units(count), recorded=recorded)


def sets(control, steps=6, norms=None):
    """Recovery sets in force in step 1, step 2 and so on."""
    norms = np.ones(len(control.units)) if norms is None else norms
    return [control.recovery_set.tolist()] + [
        control.decide(norms, step=step).recovery_set.tolist() for step in range(1, steps + 1)
    ]


def recorded_ids(control, decisions, first):
    """What a run records: ids selected after each step, and under 0 those in force in step 1."""
    ids = control.units.ids
    record = {decision.step: [ids[unit] for unit in decision.selected] for decision in decisions}
    return {0: [ids[unit] for unit in first], **record}


def test_static_low_recovers_nothing():
    assert sets(controller("static_low")) == [[]] * 7


@pytest.mark.parametrize("max_recovered", [0, 3, {0: 1, 5: 2}])
def test_static_high_recovers_everything_from_the_first_step_whatever_the_budget(max_recovered):
    control = controller("static_high", max_recovered=max_recovered, warmup_steps=4)
    assert sets(control) == [list(range(12))] * 7


def test_the_first_and_last_layers_are_recovered_within_the_budget():
    assert sets(controller("first_last_k", max_recovered=8)) == [[0, 8, 1, 9, 2, 10, 3, 11]] * 7
    assert sets(controller("first_last_k", max_recovered=3)) == [[0, 8, 1]] * 7


def test_outer_layers_come_before_inner_ones():
    control = controller("first_last_k", count=20, edge_layers=2, max_recovered=10)
    assert control.recovery_set.tolist() == [0, 16, 1, 17, 2, 18, 3, 19, 4, 12]


def test_edges_that_meet_are_all_layers():
    control = controller("first_last_k", edge_layers=9, max_recovered=100)
    assert sorted(control.recovery_set.tolist()) == list(range(12))


def test_random_fills_the_budget_from_the_first_step_and_repeats_with_its_seed():
    first = sets(controller("random", seed=1), steps=40)
    assert first == sets(controller("random", seed=1), steps=40)
    assert first != sets(controller("random", seed=2), steps=40)
    assert all(len(recovered) == 3 for recovered in first)
    # 41 draws of 3 of 12: a unit is missed with probability (3/4)^41 < 1e-5
    assert np.bincount(np.concatenate(first), minlength=12).min() > 0


def test_a_random_set_depends_on_seed_and_step_alone():
    straight, other = controller("random"), controller("random")
    after = [straight.decide(np.ones(12), step=step).selected.tolist() for step in range(1, 9)]
    other.decide(np.full(12, np.nan), step=7, updated=False)
    assert other.decide(np.zeros(12), step=8).selected.tolist() == after[-1]


@pytest.mark.parametrize(("budget", "steps"), [(3, 4), (5, 12), (1, 12), (12, 1)])
def test_round_robin_gives_every_unit_the_same_share(budget, steps):
    recovered = sets(controller("round_robin", max_recovered=budget), steps=steps - 1)
    assert all(len(one) == budget for one in recovered)
    shares = np.bincount(np.concatenate(recovered), minlength=12)
    assert shares.tolist() == [budget * steps // 12] * 12


def test_round_robin_goes_on_where_it_stopped_when_the_budget_changes():
    # budgets of 1, 1, 2, 3, 3 ... from step 0 on
    recovered = sets(controller("round_robin", max_recovered={1: 1, 3: 3}), steps=4)
    assert recovered == [[0], [1], [2, 3], [4, 5, 6], [7, 8, 9]]


@given(
    st.dictionaries(st.integers(0, 60), st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 80),
)
def test_a_sum_of_budgets_is_that_of_its_steps(schedule, step):
    assert sum_before(schedule, step) == sum(int(value_at(schedule, at)) for at in range(step))


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=12), st.integers(0, 12))
@settings(deadline=None)
def test_top_norm_takes_the_largest_norms_and_the_earlier_unit_in_a_tie(norms, budget):
    ranked = sorted(range(len(norms)), key=lambda index: (-norms[index], index))
    control = controller("top_norm", count=len(norms), max_recovered=budget)
    assert control.decide(np.array(norms), step=1).selected.tolist() == ranked[:budget]


def test_top_norm_tells_small_norms_apart():
    norms = np.array([1e-17, 3e-17, 9e-17, 2e-17])
    assert sets(controller("top_norm", count=4), norms=norms)[1] == [2, 1, 3]


def test_top_norm_takes_norms_that_are_not_finite_first():
    norms = np.array([5.0, np.nan, 9.0, np.inf])
    assert sets(controller("top_norm", count=4), norms=norms)[1] == [1, 3, 2]


def test_ema_ratio_compares_with_a_moving_average_of_clipped_norms():
    control = controller("ema_ratio", count=1, ema_decay=0.5, max_recovered=1, lock_steps=0)
    scores = [decision.score[0] for decision in run(control, [[1.0], [3.0], [3.0]])]
    # averages: 1, then 0.5 * 1 + 0.5 * min(3, 2 * 1) = 1.5; the score is norm / average / alpha
    assert scores == [0.5, 1.5, 1.0]


def test_an_alpha_that_always_triggers_leaves_the_average_free_to_rise():
    control = controller("ema_ratio", count=1, ema_decay=0.5, alpha=0.01)
    scores = [decision.score[0] for decision in run(control, [[1.0], [9.0], [9.0]])]
    assert scores[2] == pytest.approx(9.0 / (0.5 + 0.5 * 1.05) / 0.01)


def test_an_average_that_starts_at_zero_rises_with_the_first_norm():
    # LoRA's gradients of A are zero in the first step; clipped at alpha * 0 the average would stay there
    control = controller("ema_ratio", count=1, ema_decay=0.5, max_recovered=1)
    decisions = run(control, [[0.0], [0.0], [1.0], [1.0], [9.0]])
    assert [decision.score[0] for decision in decisions] == [0.5, 0.5, 0.5, 0.5, 4.5]
    assert decisions[-1].selected.tolist() == [0]


def test_zscore_counts_deviations_above_a_moving_average():
    control = controller("zscore", count=1, ema_decay=0.5, max_recovered=1, lock_steps=0)
    scores = [decision.score[0] for decision in run(control, [[1.0], [3.0], [4.0], [0.0]])]
    # after 1 and 3: mean 2, variance 0.5 * (0 + 0.5 * 2^2) = 1; norms below the mean count 0
    assert scores == [0.0, 0.0, (4.0 - 2.0) / 1.0 / 2.0, 0.0]


@given(TRACES, SETTINGS, st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_replay_repeats_the_sets_of_a_recorded_run(trace, config, policy):
    count, norms, updated = trace
    original = make(count, config, policy=policy, mode="active")
    first = original.recovery_set.tolist()
    decisions = run(original, norms, updated)
    again = Controller(
        ControlConfig(policy="replay", trace="runs/x", max_recovered=count),
        units(count),
        recorded=recorded_ids(original, decisions, first),
    )
    assert again.recovery_set.tolist() == first
    # whatever the gradients are now
    for decision in decisions:
        repeated = again.decide(np.full(count, np.nan), step=decision.step)
        assert repeated.recovery_set.tolist() == decision.recovery_set.tolist()


def test_replay_stays_within_its_own_budget_and_recovers_nothing_after_the_record_ends():
    ids = units(12).ids
    recorded = {0: [ids[5]], 1: [], 2: [ids[7], ids[1], ids[3]]}
    control = controller("replay", recorded=recorded, trace="runs/x", max_recovered=2)
    assert sets(control, steps=4) == [[5], [], [7, 1], [], []]


def test_replay_of_units_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="the recorded run has unit elsewhere, this model has not"):
        controller("replay", recorded={1: ["elsewhere"]}, trace="runs/x")


def test_replay_without_a_record_is_refused():
    with pytest.raises(ValueError, match="policy replay needs the recorded decisions"):
        controller("replay", trace="runs/x")


def test_only_policies_that_look_at_gradients_warm_up():
    assert sets(controller("top_norm", warmup_steps=2), steps=3)[1:] == [[], [], [0, 1, 2]]
    for policy in ("static_high", "first_last_k", "random", "round_robin"):
        assert all(sets(controller(policy, warmup_steps=9)))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_says_what_the_controller_asks(policy):
    built = build_policy(ControlConfig(policy=policy), units(3))
    is_fixed = policy in ("static_low", "static_high", "first_last_k", "random", "round_robin")
    assert built.is_open_loop == is_fixed
    assert built.is_budgeted == (policy != "static_high")
    assert built.has_locks == (policy in ("gnmr", "ema_ratio", "zscore"))
