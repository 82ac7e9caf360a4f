import numpy as np
import pytest

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from tests.unit.control.test_controller import units


def controller(policy, count=12, recorded=None, **changes):
    settings = {"warmup_steps": 0, "max_recovered": 3, "alpha": 2.0, **changes}
    return Controller(ControlConfig(policy=policy, **settings), units(count), recorded=recorded)


def sets(control, steps=6, norms=None):
    norms = np.ones(len(control.units)) if norms is None else norms
    return [control.recovery_set.tolist()] + [
        control.decide(norms, step=step).recovery_set.tolist() for step in range(1, steps + 1)
    ]


def test_static_low_recovers_nothing_and_static_high_everything_from_the_first_step():
    assert sets(controller("static_low")) == [[]] * 7
    assert sets(controller("static_high", max_recovered=0)) == [list(range(12))] * 7


def test_the_first_and_last_layers_are_recovered_within_the_budget():
    assert sets(controller("first_last_k", max_recovered=8)) == [[0, 1, 2, 3, 8, 9, 10, 11]] * 7
    assert sets(controller("first_last_k", max_recovered=3)) == [[0, 1, 2]] * 7


def test_random_fills_the_budget_from_the_first_step_and_repeats_with_its_seed():
    first = sets(controller("random", seed=1), steps=40)
    assert first == sets(controller("random", seed=1), steps=40)
    assert first != sets(controller("random", seed=2), steps=40)
    assert all(len(recovered) == 3 for recovered in first)
    counts = np.bincount(np.concatenate(first), minlength=12)
    assert (
        counts.min() > 0
    )  # 41 draws of 3 of 12: a unit is missed with probability (3/4)^41 < 1e-5


def test_round_robin_gives_every_unit_the_same_share():
    taken = np.concatenate(sets(controller("round_robin"), steps=11))
    assert np.bincount(taken, minlength=12).tolist() == [3] * 12


def test_top_norm_takes_the_largest_norms():
    norms = np.arange(12.0)
    assert sets(controller("top_norm"), norms=norms)[1:] == [[11, 10, 9]] * 6


def test_ema_ratio_compares_with_a_moving_average_of_clipped_norms():
    control = controller("ema_ratio", count=1, ema_decay=0.5, max_recovered=1, lock_steps=0)
    scores = [
        control.decide(np.array([norm]), step=step).score[0]
        for step, norm in enumerate([1.0, 3.0, 3.0], 1)
    ]
    # averages: 1, then 0.5 * 1 + 0.5 * min(3, 2 * 1) = 1.5; the score is norm / average / alpha
    assert scores == [0.5, 1.5, 1.0]


def test_zscore_counts_deviations_above_a_moving_average():
    control = controller("zscore", count=1, ema_decay=0.5, max_recovered=1, lock_steps=0)
    scores = [
        control.decide(np.array([norm]), step=step).score[0]
        for step, norm in enumerate([1.0, 3.0, 4.0], 1)
    ]
    # after 1 and 3: mean 2, variance 0.5 * (0 + 0.5 * 2^2) = 1
    assert scores == [0.0, 0.0, (4.0 - 2.0) / 1.0 / 2.0]


def test_replay_repeats_recorded_sets_from_the_first_step():
    ids = units(12).ids
    recorded = {0: [ids[5]], 1: [], 2: [ids[7], ids[1]]}
    assert sets(controller("replay", recorded=recorded, trace="runs/x"), steps=3) == [
        [5],
        [],
        [7, 1],
        [],
    ]


def test_replay_of_units_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="the recorded run has unit elsewhere, this model has not"):
        controller("replay", recorded={1: ["elsewhere"]}, trace="runs/x")


def test_only_policies_that_look_at_gradients_warm_up():
    assert sets(controller("top_norm", warmup_steps=2), steps=3)[1:] == [[], [], [0, 1, 2]]
    assert len(sets(controller("random", warmup_steps=2))[0]) == 3
