import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.statistics import GradNormHistory, delta_gnmr, gnmr
from tests.references.control_reference import ReferenceUnit
from tests.unit.control.strategies import MEANS, TRACES


def test_gnmr_is_one_without_a_mean_and_infinite_where_the_norm_is_not_finite():
    norms = np.array([6.0, 6.0, 0.0, 0.0, math.nan, math.inf, -math.inf, math.nan])
    means = np.array([2.0, 0.0, 2.0, 0.0, 2.0, 2.0, 2.0, 0.0])
    assert gnmr(norms, means).tolist() == [3.0, 1.0, 0.0, 1.0] + [math.inf] * 4


def test_delta_gnmr_is_infinite_where_a_dead_gradient_returns():
    current = np.array([3.0, 3.0, 0.0, 3.0, math.inf, math.inf])
    recent = np.array([2.0, 0.0, 0.0, 0.0, 2.0, 2.0])
    is_full = np.array([True, True, True, False, True, False])
    expected = [1.5, math.inf, 1.0, 1.0, math.inf, math.inf]
    assert delta_gnmr(current, recent, is_full).tolist() == expected


@given(TRACES, st.sampled_from(MEANS), st.integers(1, 6), st.floats(0.01, 0.999))
@settings(max_examples=60, deadline=None)
def test_every_mean_equals_one_that_is_summed_afresh(trace, mean, window, ema_decay):
    count, norms, updated = trace
    kind = {"mean": mean, "window": window, "ema_decay": ema_decay}
    history = GradNormHistory(count, delta=2, **kind)
    slow = [ReferenceUnit() for _ in range(count)]
    for row, flag in zip(norms, updated, strict=True):
        np.testing.assert_array_equal(history.mean(), [unit.mean(kind) for unit in slow])
        if not flag:
            continue
        history.fold(np.array(row), np.ones(count))
        for unit, norm in zip(slow, row, strict=True):
            unit.norms += [(norm, False)] if math.isfinite(norm) else []


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60), st.floats(0.01, 0.99))
@settings(deadline=None)
def test_the_moving_mean_has_the_weights_of_the_closed_form(norms, decay):
    history = GradNormHistory(1, delta=1, mean="ema", ema_decay=decay)
    for norm in norms:
        history.fold(np.array([norm]), np.ones(1))
    weights = decay ** np.arange(len(norms) - 1, -1, -1.0)
    # another order of sums: equal up to rounding only
    np.testing.assert_allclose(history.mean(), np.average(norms, weights=weights), rtol=1e-12)


@pytest.mark.parametrize("mean", MEANS)
def test_the_mean_of_equal_norms_is_that_norm(mean):
    history = GradNormHistory(3, delta=1, mean=mean, window=4, ema_decay=0.5)
    for _ in range(10):
        history.fold(np.array([0.5, 2.0, 0.0]), np.ones(3))
    assert history.mean().tolist() == [0.5, 2.0, 0.0]


@given(TRACES, st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_all_norms_times_a_power_of_two_leave_the_ratios_as_they_are(trace, delta):
    count, norms, _ = trace
    one, other = (GradNormHistory(count, delta=delta) for _ in range(2))
    for row in np.array(norms):
        with np.errstate(all="ignore"):
            ours, theirs = one.ratios(row), other.ratios(row * 16.0)
        np.testing.assert_array_equal(ours, theirs)
        one.fold(row, ours[0])
        other.fold(row * 16.0, theirs[0])


@pytest.mark.parametrize("mean", MEANS)
def test_a_unit_has_the_same_ratios_whatever_units_stand_beside_it(mean):
    # windows of more than 8 steps: from there on NumPy sums a single column in another order
    whole = GradNormHistory(5, delta=20, mean=mean, window=30)
    alone = GradNormHistory(1, delta=20, mean=mean, window=30)
    for row in np.random.default_rng(3).lognormal(sigma=2.0, size=(100, 5)):
        with np.errstate(all="ignore"):
            ours, theirs = alone.ratios(row[-1:]), whole.ratios(row)
        np.testing.assert_array_equal(np.array(ours)[:, 0], np.array(theirs)[:, -1])
        alone.fold(row[-1:], ours[0])
        whole.fold(row, theirs[0])


def test_neither_the_state_nor_the_given_arrays_share_memory_with_the_history():
    history, norms, ratios = (
        GradNormHistory(2, delta=1, mean="window", window=2),
        np.ones(2),
        np.ones(2),
    )
    history.fold(norms, ratios)
    state = history.state_dict()
    other = GradNormHistory(2, delta=1, mean="window", window=2)
    other.load_state_dict(state)
    groups = [
        [norms, ratios],
        list(state.values()),
        *([x for x in vars(h).values() if isinstance(x, np.ndarray)] for h in (history, other)),
    ]
    for one, another in itertools.combinations(groups, 2):
        for left, right in itertools.product(one, another):
            assert not np.shares_memory(left, right)


@pytest.mark.parametrize(("changes", "name"), [({"delta": 4}, "recent"), ({"window": 3}, "past")])
def test_a_history_of_other_sizes_is_refused_by_name(changes, name):
    settings = {"delta": 2, "mean": "window", "window": 5}
    with pytest.raises(ValueError, match=f"history `{name}` has shape"):
        GradNormHistory(2, **{**settings, **changes}).load_state_dict(
            GradNormHistory(2, **settings).state_dict()
        )
