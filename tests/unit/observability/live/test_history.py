import math

import numpy as np
import pytest

from gnmr_megatron.observability.live.history import MOST_POINTS, CurveHistory, sparkline


def history(values):
    curve = CurveHistory()
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    return curve


def test_blocks_rise_with_the_values_from_the_lowest_to_the_highest():
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, -2.0]) == "█▁"


def test_a_flat_curve_lies_at_the_bottom():
    assert sparkline([3.0, 3.0]) == "▁▁"


def test_values_that_are_not_finite_are_crosses_and_do_not_set_the_scale():
    assert sparkline([0.0, math.nan, 7.0, math.inf]) == "▁×█×"
    assert sparkline([math.nan]) == "×"
    assert sparkline([]) == ""


def test_a_short_curve_is_shown_value_by_value():
    assert history([4.0, 3.0, 2.5]).columns(10) == [4.0, 3.0, 2.5]


@pytest.mark.parametrize("count", [600, MOST_POINTS - 1, MOST_POINTS, 3000, 50_000])
def test_a_column_is_the_mean_of_its_share_of_the_steps(count):
    values = np.linspace(9.0, 2.0, count)
    expected = [part.mean() for part in np.array_split(values, 30)]
    # a point may lie across a border, and counts where its middle is
    assert history(values).columns(30) == pytest.approx(expected, abs=7.0 / 30 / 8)


def test_a_point_counts_for_the_steps_since_the_one_before():
    curve = CurveHistory()
    for step in (*range(10, 1001, 10), *range(1001, 1011)):  # every tenth step, then every one
        curve.add(step, 1.0 if step <= 1000 else 2.0)
    *_, last = curve.columns(10)
    assert last == pytest.approx((90 + 2 * 10) / 100, abs=0.02)


def test_memory_does_not_grow_with_the_run():
    assert len(history(np.ones(20 * MOST_POINTS + 7)).columns(10**6)) < 2 * MOST_POINTS


def test_one_step_that_was_not_finite_is_seen_among_many():
    values = np.ones(5000)
    values[2600] = math.nan
    assert sparkline(history(values).columns(10)) == "▁▁▁▁▁×▁▁▁▁"
