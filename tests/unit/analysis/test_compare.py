"""A planted difference of two runs is found where it was planted, with its cause."""

import dataclasses
import json

import numpy as np
import pytest

from gnmr_megatron.analysis.compare import compare
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.cli import diff
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.risk_matrix import risk_matrix_dtype
from tests.unit.analysis.recorded import Attempt, lively_norms, record, unit_table

BASE = ControlConfig(alpha=3.0, beta=2.0, delta=3, max_recovered=1, lock_steps=2, warmup_steps=3)
IDS = unit_table(4).ids


def steady(**shocks):
    """Twenty steps of norm 1, and shocks `s<step>_<unit>=norm`."""
    norms = np.ones((20, 4))
    for name, value in shocks.items():
        step, unit = name[1:].split("_")
        norms[int(step) - 1, int(unit)] = value
    return norms


@pytest.fixture
def runs(tmp_path):
    """Compare two recordings, each given by norms and settings."""

    def compared(left, right):
        number = len(list(tmp_path.iterdir()))
        folders = [tmp_path / f"left{number}", tmp_path / f"right{number}"]
        opened = [
            RecordedRun(record(f, *args)) for f, args in zip(folders, (left, right), strict=True)
        ]
        return compare(*opened)

    return compared


def test_equal_runs_are_equal(runs):
    norms = lively_norms(40, 4)
    norms[20, 1] = np.nan
    found = runs((norms, BASE), (norms, dataclasses.replace(BASE, check_interval=7)))
    assert found.equal
    assert (found.norms, found.first_difference, found.decision) == ("equal", None, None)


@pytest.mark.parametrize(("factor", "kind"), [(1 + 1e-9, "rounding"), (1 + 1e-4, "different")])
def test_norms_that_differ_are_told_with_unit_and_size(runs, factor, kind):
    other = steady()
    other[11:, 2] *= factor
    other[11, 3] *= 1 + 1e-12
    found = runs((steady(), BASE), (other, BASE))
    assert not found.equal
    assert (found.norms, found.first_difference) == (kind, 12)
    assert (found.first_bit.step, found.first_bit.unit) == (12, IDS[2])
    assert found.first_bit.relative == pytest.approx(1 - 1 / factor, rel=1e-6)
    assert (found.first_real is None) == (kind == "rounding")
    assert found.decision is None


def test_a_decision_that_differs_by_norms_says_so(runs):
    found = runs((steady(s10_1=5.0), BASE), (steady(), BASE))
    assert (found.decision.step, found.decision.cause, found.decision.unit) == (10, "norms", IDS[1])
    assert found.decision.selected == ((IDS[1],), ())
    assert found.recovered == 11
    assert "scored 2.5 in the first run (GNMR 5, delta-GNMR 5" in found.decision.why


def test_a_decision_that_differs_by_settings_names_the_keys(runs):
    changed = dataclasses.replace(BASE, alpha=9.0, beta=9.0)
    attempts = [Attempt(1, BASE), Attempt(7, changed)]
    found = runs((steady(s10_1=5.0), BASE), (steady(s10_1=5.0), attempts))
    assert found.norms == "equal"
    assert found.settings.step == 7
    assert found.settings.keys == {"gnmr.alpha": (3.0, 9.0), "gnmr.beta": (2.0, 9.0)}
    assert (found.decision.step, found.decision.cause) == (10, "settings")
    same = runs((steady(), BASE), (steady(), attempts))
    assert (same.first_difference, same.settings.step, same.equal) == (None, 7, False)


def test_warm_up_is_a_setting(runs):
    changed = dataclasses.replace(BASE, warmup_steps=15)
    found = runs((steady(s10_1=5.0), BASE), (steady(s10_1=5.0), changed))
    assert (found.decision.cause, found.decision.why) == (
        "settings",
        "the second run was warming up",
    )


def test_with_other_norms_and_settings_the_one_that_matters_is_named(runs):
    looser = dataclasses.replace(BASE, alpha=3.5)
    by_norms = runs((steady(s10_1=5.0), BASE), (steady(), looser))
    assert by_norms.decision.cause == "norms"
    loose = dataclasses.replace(BASE, alpha=90.0, beta=90.0)
    by_settings = runs((steady(s10_1=5.0), BASE), (steady(s10_1=5.0 + 1e-9), loose))
    assert by_settings.decision.cause == "settings"


def test_a_lock_is_named_where_it_made_the_difference(runs):
    # both recover unit 1 after step 10; with another lock the second one lets it go earlier
    shorter = dataclasses.replace(BASE, lock_steps=1)
    found = runs((steady(s10_1=5.0), BASE), (steady(s10_1=5.0), shorter))
    assert (found.decision.step, found.decision.cause) == (12, "locks")
    assert found.decision.why == "its lock was 1 in the first run, 0 in the second"


def test_the_budget_is_named_where_it_made_the_difference(runs):
    larger = dataclasses.replace(BASE, max_recovered=2)
    norms = steady(s10_1=5.0, s10_3=4.0)
    found = runs((norms, BASE), (norms, larger))
    assert (found.decision.cause, found.decision.unit) == ("budget", IDS[3])
    assert found.decision.why == (
        "a candidate in both runs, at place 2 of 2 for 1 in the first, 2 of 2 for 2 in the second"
    )


def test_a_damaged_record_is_told_from_another_decision(tmp_path):
    left, right = (record(tmp_path / name, steady(), BASE) for name in ("left", "right"))
    records = np.fromfile(right / "risk_matrix.bin", risk_matrix_dtype(4))
    records["flags"][14, 2] = 2
    records.tofile(right / "risk_matrix.bin")
    found = compare(RecordedRun(left), RecordedRun(right))
    assert (found.decision.step, found.decision.cause, found.decision.unit) == (
        15,
        "record",
        IDS[2],
    )


def test_lengths_are_told_and_the_exit_code_is_that_of_diff(tmp_path, capsys):
    left = record(tmp_path / "left", steady(), BASE)
    right = record(tmp_path / "right", steady()[:14], BASE)
    assert diff.run([str(left), str(left)]) == 0
    assert capsys.readouterr().out == "equal: settings, norms and decisions of 20 steps\n"
    assert diff.run([str(left), str(right)]) == 1
    printed = capsys.readouterr().out
    assert "no step differs; 14 steps compared" in printed
    assert "20 and 14 steps" in printed
    assert diff.run([str(left), str(right), "--json"]) == 1
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (values["equal"], values["steps"], values["norms"]) == (False, [20, 14], "equal")


def test_runs_of_other_units_are_refused_with_a_unit(tmp_path):
    left = RecordedRun(record(tmp_path / "left", steady(), BASE))
    more = RecordedRun(record(tmp_path / "more", np.ones((20, 6)), BASE))
    with pytest.raises(DataError, match=rf"4 and 6; only .*more has {unit_table(6).ids[4]}"):
        compare(left, more)
    names = unit_table(4, rename={2: "decoder.layers.0.mlp.router"})
    other = RecordedRun(record(tmp_path / "other", steady(), BASE, units=names))
    with pytest.raises(DataError, match=r"number 2 is .*linear_fc1 in the first, .*mlp\.router"):
        compare(left, other)
