import numpy as np
import pytest

from gnmr_megatron.observability.spikes import SpikeDetector


def test_the_bound_is_the_mean_and_six_deviations_of_the_window():
    values = np.random.default_rng(0).normal(4.0, 0.1, 300)
    detector = SpikeDetector(window=128)
    for value in values:
        detector.add(float(value))
    last = values[-128:]
    assert detector.threshold() == pytest.approx(last.mean() + 6 * last.std(), rel=1e-12)
    assert not detector.add(detector.threshold() - 1e-9)
    assert detector.add(detector.threshold() + 1e-9)


def test_nothing_is_judged_before_enough_was_seen():
    detector = SpikeDetector(least=4)
    assert not any(detector.add(value) for value in (1.0, 1.0, 1.0, 900.0))
    assert SpikeDetector(least=4).threshold() == float("inf")


def test_values_that_are_not_finite_are_left_out():
    detector = SpikeDetector(least=2)
    for value in (1.0, float("nan"), 1.0, float("inf")):
        assert not detector.add(value)
    assert detector.threshold() == 1.0
