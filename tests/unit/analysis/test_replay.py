"""Replays decide as the recorded controller did, and otherwise as the slow reference does."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnmr_megatron.analysis.grid import combinations, replay_grid
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.replay import replay
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError, DataError
from gnmr_megatron.observability.risk_matrix import RECOVERED, SELECTED, risk_matrix_dtype
from gnmr_megatron.observability.summary import summarize
from tests.references.control_reference import ReferenceController
from tests.unit.analysis.recorded import Attempt, lively_norms, record, unit_table
from tests.unit.control.strategies import POLICIES, SETTINGS, TRACES

LIVELY = ControlConfig(
    alpha=1.5, beta=1.5, delta=3, max_recovered=2, lock_steps=3, warmup_steps=4, seed=5
)
STEPS, UNITS = 90, 8


@pytest.fixture(scope="module")
def lively(tmp_path_factory):
    """Ninety steps of eight units with shocks, a norm that is not finite and a skipped step."""
    norms = lively_norms(STEPS, UNITS)
    norms[40, 3] = math.inf
    updated = np.arange(STEPS) != 40
    return record(tmp_path_factory.mktemp("lively") / "run", norms, LIVELY, updated=updated)


def change_record(folder, step, change):
    """Damage the record of a step."""
    path = folder / "risk_matrix.bin"
    count = len(json.loads((folder / "units.json").read_text())["units"])
    records = np.fromfile(path, risk_matrix_dtype(count))
    change(records[np.flatnonzero(records["step"] == step)[0]])
    records.tofile(path)


def test_a_run_replays_as_recorded_and_its_figures_are_those_of_its_events(lively):
    result = replay(RecordedRun(lively))
    summary = summarize(lively)
    assert result.difference is None
    assert result.figures.steps == STEPS
    assert result.figures.recovered_unit_steps == summary.recovered_unit_steps > 30
    assert result.figures.exceedance_rate == pytest.approx(summary.over_threshold_percent / 100)
    matrix = RecordedRun(lively).matrix
    changes = sum(
        int(before[unit] != after[unit])
        for before, after in zip(matrix.recovered[:-1], matrix.recovered[1:], strict=True)
        for unit in range(UNITS)
    )
    assert result.figures.switches == changes > 20
    assert result.figures.budget_use == pytest.approx(matrix.selected.sum() / (2 * STEPS))


@given(trace=TRACES, config=SETTINGS, policy=st.sampled_from(POLICIES))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_settings_and_policy_replay_as_recorded(trace, config, policy, tmp_path_factory):
    _, norms, updated = trace
    folder = record(
        tmp_path_factory.mktemp("drawn") / "run",
        np.array(norms),
        ControlConfig(**config, policy=policy),
        updated=updated,
    )
    assert replay(RecordedRun(folder)).difference is None


def test_a_counterfactual_decides_as_the_slow_reference(lively):
    changes = {"alpha": {0: 1.2, 80: 2.0}, "beta": 1.3, "delta": 5, "max_recovered": 3}
    changes |= {"lock_steps": 1, "mean": "ema", "ema_decay": 0.9}
    result, matrix = replay(RecordedRun(lively), changes), RecordedRun(lively).matrix
    config = dataclasses.asdict(LIVELY) | changes
    reference, over = ReferenceController(UNITS, config), 0
    for row, step in enumerate(matrix.steps):
        decided = reference.decide(
            matrix.norms[row].tolist(), step=int(step), updated=bool(matrix.updated[row])
        )
        assert sorted(decided["selected"]) == np.flatnonzero(result.selected[row]).tolist()
        if row + 1 < STEPS:
            assert sorted(decided["selected"]) == np.flatnonzero(result.in_force[row + 1]).tolist()
        over += sum(score > 1 for score in decided["score"]) if step > config["warmup_steps"] else 0
    assert result.figures.exceedance_rate == over / (STEPS * UNITS)
    assert not result.figures.identical


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_replays_on_norms_of_another_one(lively, policy, tmp_path):
    result = replay(RecordedRun(lively), {"policy": policy})
    matrix = RecordedRun(lively).matrix
    recorded = record(
        tmp_path / "run",
        np.array(matrix.norms),
        dataclasses.replace(LIVELY, policy=policy),
        updated=matrix.updated,
    )
    assert replay(RecordedRun(recorded)).difference is None
    np.testing.assert_array_equal(result.selected, RecordedRun(recorded).matrix.selected)
    np.testing.assert_array_equal(result.in_force, RecordedRun(recorded).matrix.recovered)


def test_the_decisions_of_another_run_can_be_repeated(lively, tmp_path):
    changes = {"policy": "replay", "trace": str(lively)}
    assert replay(RecordedRun(lively), changes).figures.identical
    matrix = RecordedRun(lively).matrix
    repeated = record(
        tmp_path / "repeated",
        np.array(matrix.norms),
        dataclasses.replace(LIVELY, **changes),
        trace=matrix.decisions(),
    )
    assert replay(RecordedRun(repeated)).difference is None
    names = {unit: f"encoder.{unit}" for unit in range(4)}
    other = record(
        tmp_path / "other", lively_norms(STEPS, 4), LIVELY, units=unit_table(4, rename=names)
    )
    with pytest.raises(ConfigError, match=r"the recorded run has unit encoder\.0, this model has"):
        replay(RecordedRun(lively), {"policy": "replay", "trace": str(other)})


def test_monitor_mode_counts_what_would_have_been_recovered(lively, tmp_path):
    matrix = RecordedRun(lively).matrix
    monitor = record(
        tmp_path / "run",
        np.array(matrix.norms),
        dataclasses.replace(LIVELY, mode="monitor"),
        updated=matrix.updated,
    )
    assert not RecordedRun(monitor).matrix.recovered.any()
    result = replay(RecordedRun(monitor))
    assert result.figures == replay(RecordedRun(lively)).figures
    assert replay(RecordedRun(monitor), {"mode": "active"}).figures == result.figures


ATTEMPTS = [
    Attempt(1, LIVELY),
    Attempt(21, dataclasses.replace(LIVELY, alpha=1.2, max_recovered=1, lock_steps=6)),
    Attempt(31, dataclasses.replace(LIVELY, mode="monitor")),
    Attempt(41, dataclasses.replace(LIVELY, mode="disabled")),
    Attempt(51, dataclasses.replace(LIVELY, policy="zscore", mean="window", window=7)),
    Attempt(
        71, dataclasses.replace(LIVELY, policy="zscore", mean="window", window=7), restarts=True
    ),
]


def test_attempts_with_other_settings_replay_with_theirs(tmp_path):
    folder = record(tmp_path / "run", lively_norms(STEPS, UNITS, seed=1), ATTEMPTS)
    result = replay(RecordedRun(folder))
    assert result.difference is None
    assert result.steps.tolist() == [*range(1, 41), *range(51, STEPS + 1)]
    assert len({tuple(row) for row in result.selected[60:]}) > 2  # zscore had something to do
    assert result.budget[15:25].tolist() == [2] * 5 + [1] * 5
    assert not replay(RecordedRun(folder), {"lock_steps": 0}).figures.identical


def test_a_flipped_selection_is_found_with_its_step_and_unit(lively, tmp_path):
    matrix = RecordedRun(lively).matrix
    folder = record(tmp_path / "run", np.array(matrix.norms), LIVELY, updated=matrix.updated)

    def flip(flags, bit, unit):
        flags[unit] ^= bit

    change_record(folder, 57, lambda line: flip(line["flags"], SELECTED, 6))
    assert replay(RecordedRun(folder)).difference.startswith(
        "step 57: selected after it, recorded: "
    )
    assert unit_table(8).ids[6] in replay(RecordedRun(folder)).difference
    change_record(folder, 33, lambda line: flip(line["flags"], RECOVERED, 2))
    assert replay(RecordedRun(folder)).difference.startswith("step 33: on the recovery path in it")
    change_record(folder, 8, lambda line: line["norm"].__setitem__(5, 1.25))
    ids, difference = unit_table(8).ids, replay(RecordedRun(folder)).difference
    assert difference.startswith(f"step 8: gnmr of {ids[5]} is recorded as ")


def test_steps_that_are_missing_are_refused(lively, tmp_path):
    matrix = RecordedRun(lively).matrix
    folder = record(tmp_path / "run", np.array(matrix.norms), LIVELY)
    path = folder / "risk_matrix.bin"
    size = risk_matrix_dtype(UNITS).itemsize
    whole = path.read_bytes()
    path.write_bytes(
        whole[: 5 * size] + whole[6 * size : -3]
    )  # one record, and the end of the last
    with pytest.raises(DataError, match="its risk matrix is not whole: step 6 is missing"):
        replay(RecordedRun(folder))
    path.write_bytes(whole[:-3])  # still being written
    assert replay(RecordedRun(folder)).figures.steps == STEPS - 1
    path.write_bytes(b"")
    with pytest.raises(DataError, match="has no step with norms yet"):
        replay(RecordedRun(folder))


def test_attempts_that_do_not_go_on_with_the_state_before_are_refused(tmp_path):
    norms = np.ones((6, 2))
    folder = record(tmp_path / "run", norms, [Attempt(1, LIVELY), Attempt(4, LIVELY)])
    log = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    changed = [
        line.replace('"delta": 3', '"delta": 4') if '"step": 4' in line else line for line in log
    ]
    (folder / "events.jsonl").write_text("".join(changed))
    with pytest.raises(
        DataError, match="does not go on with the state before it: history `recent`"
    ):
        replay(RecordedRun(folder))
    (folder / "events.jsonl").write_text("".join(changed[4:]))
    with pytest.raises(DataError, match="its log begins with step 4"):
        replay(RecordedRun(folder))


def test_a_grid_gives_the_figures_of_single_replays(lively):
    run = RecordedRun(lively)
    grid = list(combinations({"alpha": [1.5, 2.5], "max_recovered": [1, 2]}))
    assert [tuple(changes.values()) for changes in grid] == [(1.5, 1), (1.5, 2), (2.5, 1), (2.5, 2)]
    told = []
    figures = replay_grid(run, grid, tell=lambda: told.append(1))
    assert figures == [replay(run, changes).figures for changes in grid]
    assert [item.identical for item in figures] == [False, True, False, False]
    assert len(told) == 4
