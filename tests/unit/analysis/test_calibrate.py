"""A calibration meets its target where the future is like the past, and says so where it is not."""

import dataclasses
import itertools
import json
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gnmr_megatron.analysis.calibrate import calibrate
from gnmr_megatron.analysis.calibrate_text import fragment, write_fragment
from gnmr_megatron.analysis.clusters import LOCKS, covering_lock, settled_after
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.replay import replay
from gnmr_megatron.analysis.thresholds import Ratios, balanced_thresholds, trace_ratios
from gnmr_megatron.cli import calibrate as verb
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError, DataError
from gnmr_megatron.training.config_files import parse_run, run_parser
from tests.conftest import ROOT
from tests.references.control_reference import ReferenceController
from tests.unit.analysis.recorded import Attempt, lively_norms, record

MONITOR = ControlConfig(mode="monitor")
SIGMA, STEPS, UNITS, TARGET = 0.3, 1500, 20, 0.01


def steady_norms(steps=STEPS, *, sigma=SIGMA, seed=0):
    return np.random.default_rng(seed).lognormal(sigma=sigma, size=(steps, UNITS))


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A run whose norms are lognormal all the time, independent of each other."""
    return record(
        tmp_path_factory.mktemp("steady") / "run", steady_norms(), MONITOR, step_events=False
    )


@pytest.fixture(scope="module")
def found(steady):
    return calibrate(RecordedRun(steady), target=TARGET, max_recovered=4)


def test_the_target_is_met_on_the_part_that_was_not_fitted(found):
    fit, check = found.chosen.fit, found.chosen.held_out
    assert (fit.last_step, check.first_step, check.last_step) == (900, 901, STEPS)
    assert 0.97 * TARGET <= fit.exceedance_rate <= TARGET
    # 120 are expected: 3 standard deviations of a binomial number
    assert abs(check.exceedances - check.expected) < 3 * math.sqrt(check.expected)
    assert found.warnings == ()


def test_alpha_is_the_quantile_that_the_closed_form_gives(found):
    rate = found.by_gnmr * found.chosen.fit.exceedance_rate
    # GNMR is exp(sigma z) over the mean of such numbers, exp(sigma^2 / 2)
    expected = math.exp(SIGMA * NormalDist().inv_cdf(1 - rate) - SIGMA**2 / 2)
    assert found.chosen.alpha == pytest.approx(expected, rel=0.02)
    assert found.by_gnmr == pytest.approx(found.by_delta_gnmr, abs=0.02)


def test_settled_and_independent_norms_ask_for_no_long_warm_up_or_lock(found):
    assert found.settings["warmup_steps"] == 10
    assert found.settings["lock_steps"] <= 2
    assert found.settings["delta"] >= 16  # a longer mean is the quieter one


def test_the_figures_are_those_of_a_replay_with_these_settings(steady, found):
    result = replay(RecordedRun(steady), found.settings)
    assert result.over_threshold[900:].sum() == found.chosen.held_out.exceedances
    assert result.in_force[900:].mean() == pytest.approx(found.chosen.held_out.recovered_rate)


def test_the_curve_rises_as_thresholds_fall(found):
    points = found.curve
    assert [point.target for point in points] == pytest.approx([0.0025, 0.005, 0.01, 0.02, 0.04])
    for lower, higher in itertools.pairwise(points):
        assert lower.alpha > higher.alpha
        assert lower.beta > higher.beta
        assert lower.held_out.exceedances < higher.held_out.exceedances


@given(
    arrays(np.float64, (9, 3), elements=st.floats(0.1, 5)),
    arrays(np.float64, (9, 3), elements=st.floats(0.1, 5)),
    st.floats(0.05, 0.9),
)
@settings(max_examples=100, deadline=None)
def test_no_balanced_thresholds_pass_the_rate(gnmr, delta_gnmr, rate):
    ratios = Ratios(gnmr, delta_gnmr)
    alpha, beta = balanced_thresholds(ratios, rate)
    assert ratios.is_risky(alpha, beta).mean() <= rate


def test_thresholds_are_the_lowest_balanced_ones():
    rng = np.random.default_rng(1)
    ratios = Ratios(rng.lognormal(size=(40, 5)), rng.lognormal(size=(40, 5)))
    for rate in (0.01, 0.05, 0.2):
        alpha, beta = balanced_thresholds(ratios, rate)
        count = int((ratios.gnmr > alpha).sum())
        assert count == (ratios.delta_gnmr > beta).sum()
        # one more in each list, and the rate is passed: sorted by hand
        lower = [np.sort(values.ravel())[-count - 1] for values in ratios]
        assert ((ratios.gnmr >= lower[0]) | (ratios.delta_gnmr >= lower[1])).mean() > rate


def test_ratios_of_a_trace_are_those_of_the_reference():
    norms = lively_norms(40, 3)
    norms[20, 1], norms[22, 2] = math.inf, 0.0
    updated = np.arange(40) % 7 != 3
    config = {
        "alpha": 9,
        "beta": 9,
        "delta": 3,
        "max_recovered": 0,
        "lock_steps": 0,
        "warmup_steps": 0,
    }
    reference = ReferenceController(3, config)
    ratios = trace_ratios(norms, updated, ControlConfig(delta=3))
    for row in range(40):
        decided = reference.decide(norms[row].tolist(), step=row + 1, updated=updated[row])
        assert ratios.gnmr[row].tolist() == decided["gnmr"]
        assert ratios.delta_gnmr[row].tolist() == decided["delta_gnmr"]


def test_the_warm_up_covers_a_wild_beginning_but_no_late_burst():
    rng = np.random.default_rng(2)
    risky = rng.random((1000, 10)) < 0.005
    assert settled_after(risky, 0.005) == 0
    risky[700:715] |= rng.random((15, 10)) < 0.5
    assert settled_after(risky, 0.005) == 0
    risky[:150] |= rng.random((150, 10)) < 0.05
    assert settled_after(risky, 0.005) == pytest.approx(150, abs=25)


def test_the_lock_covers_the_returns_of_an_event():
    risky = np.zeros((4000, 4), dtype=bool)
    for start in range(10, 3900, 130):
        risky[start : start + 19 : 6, start % 4] = True  # returns 6 steps later
    assert covering_lock(risky) == 5
    assert covering_lock(np.random.default_rng(3).random((4000, 4)) < 0.01) == 1


def test_the_lock_is_shortened_where_it_would_fill_the_budget(tmp_path):
    norms = steady_norms(1000, sigma=0.05)
    for start in range(20, 990, 12):
        norms[start : start + 9 : 4, start % UNITS] *= 3.0
        norms[start + 1 : start + 10 : 4, (start + 7) % UNITS] *= 3.0
    run = RecordedRun(record(tmp_path / "run", norms, MONITOR, step_events=False))
    roomy, tight = (calibrate(run, target=TARGET, max_recovered=budget) for budget in (6, 1))
    locks = roomy.settings["lock_steps"], tight.settings["lock_steps"]
    assert locks[1] < locks[0]
    begin = slice(tight.settings["warmup_steps"], 600)
    longer = replay(run, {**tight.settings, "lock_steps": LOCKS[LOCKS.index(locks[1]) + 1]})
    assert (longer.candidates[begin] > 1).mean() > 0.05


def test_a_check_that_misses_the_target_is_told(tmp_path):
    norms = np.concatenate([steady_norms(900), steady_norms(600, sigma=0.6, seed=1)])
    run = RecordedRun(record(tmp_path / "run", norms, MONITOR, step_events=False))
    found = calibrate(run, target=TARGET, max_recovered=4)
    assert found.chosen.held_out.exceedance_rate > 4 * TARGET
    assert any("the check misses the target" in warning for warning in found.warnings)


def test_switched_units_and_a_history_that_began_anew_are_told(tmp_path):
    attempts = [Attempt(1, ControlConfig()), Attempt(301, ControlConfig(), restarts=True)]
    run = RecordedRun(record(tmp_path / "run", steady_norms(1100), attempts, step_events=False))
    found = calibrate(run, target=TARGET, max_recovered=4)
    assert found.chosen.fit.first_step == 311
    switched = int(run.matrix.recovered[300:].sum())
    assert f"{switched:,} unit-steps of this run ran on the recovery path" in found.warnings[0]
    assert found.warnings[1].startswith("history began anew with step 301")


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [({}, False), ({"history": "per_path"}, True), ({"fold_switches": False}, True)],
)
def test_histories_that_the_fit_does_not_know_are_told(tmp_path, changes, is_told):
    config = ControlConfig(**changes)
    run = RecordedRun(record(tmp_path / "run", steady_norms(600), config, step_events=False))
    assert run.matrix.recovered.any()
    found = calibrate(run, target=TARGET, max_recovered=4)
    assert any("with one history of all norms" in text for text in found.warnings) == is_told


def test_a_fit_that_misses_the_target_is_told(tmp_path):
    # norms that are all the same: no threshold lets one of a hundred pass
    same = RecordedRun(record(tmp_path / "run", np.ones((600, UNITS)), MONITOR, step_events=False))
    found = calibrate(same, target=TARGET, max_recovered=4)
    assert found.chosen.fit.exceedances == 0
    assert any("the fit itself misses the target: 0.000%" in text for text in found.warnings)


def test_attempts_without_control_end_a_trace_and_leave_it_whole(tmp_path):
    off = ControlConfig(mode="disabled")
    attempts = [Attempt(1, MONITOR), Attempt(701, off), Attempt(711, off)]
    norms = steady_norms(720)
    run = RecordedRun(record(tmp_path / "off", norms, attempts, step_events=False))
    found = calibrate(run, target=TARGET, max_recovered=4)
    assert (found.chosen.fit.first_step, found.chosen.held_out.last_step) == (11, 700)
    attempts = [Attempt(1, MONITOR), Attempt(101, off), Attempt(111, off), Attempt(121, MONITOR)]
    run = RecordedRun(record(tmp_path / "on", norms, attempts, step_events=False))
    found = calibrate(run, target=TARGET, max_recovered=4)
    assert (found.chosen.fit.first_step, found.chosen.held_out.last_step) == (131, 720)
    # an attempt that ended before its first step
    attempts = [Attempt(1, MONITOR), Attempt(721, MONITOR, restarts=True)]
    run = RecordedRun(record(tmp_path / "short", norms, attempts, step_events=False))
    found = calibrate(run, target=TARGET, max_recovered=4)
    assert (found.chosen.fit.first_step, found.chosen.held_out.last_step) == (11, 720)


def test_what_cannot_be_calibrated_is_refused(steady, tmp_path):
    run = RecordedRun(steady)
    with pytest.raises(ConfigError, match=r"--target-exceedance: 0\.5 must be"):
        calibrate(run, target=0.5, max_recovered=4)
    with pytest.raises(ConfigError, match="--max-recovered: 21 must be between 1 and the 20 units"):
        calibrate(run, target=TARGET, max_recovered=21)
    short = record(tmp_path / "short", steady_norms(50), MONITOR)
    with pytest.raises(DataError, match=r"50 steps x 20 units are too few .* record at least 126"):
        calibrate(RecordedRun(short), target=0.002, max_recovered=2)
    broken = steady_norms(300)
    broken[::5, :5] = math.nan
    with pytest.raises(DataError, match="norms that are not finite are more than that"):
        calibrate(
            RecordedRun(record(tmp_path / "nan", broken, MONITOR)), target=0.01, max_recovered=2
        )


def test_the_settings_parse_as_those_of_a_run(steady, found, tmp_path, capsys):
    path = tmp_path / "calibrated.yaml"
    options = [str(steady), "--target-exceedance", str(TARGET), "--max-recovered", "4"]
    assert verb.run([*options, "--output", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"] == found.settings
    assert path.read_text() == fragment(found)
    with pytest.raises(ConfigError, match=r"calibrated\.yaml exists"):
        write_fragment(found, path)

    def parsed(*files):
        parser = run_parser("train", description="", epilog="")
        return parse_run(parser, [item for file in files for item in ("--config", str(file))])[0]

    assert parsed(path).gnmr == dataclasses.replace(ControlConfig(), **found.settings)
    base = ROOT / "configs" / "runs" / "quickstart.yaml"
    (tmp_path / "monitor.yaml").write_text("gnmr: {mode: monitor, seed: 7, alpha: 9.0}\n")
    both = parsed(base, tmp_path / "monitor.yaml", path)
    assert both.gnmr == dataclasses.replace(
        parsed(base).gnmr, **{"mode": "monitor", "seed": 7, **found.settings}
    )
    assert both.model == parsed(base).model
