"""Arrays, locks, spans and spikes of a run, against the controller that made it and plain loops."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.report.blocks import recovery_spans
from gnmr_megatron.analysis.report.history import (
    REASONS,
    UNKNOWN_REASON,
    Selections,
    read_history,
)
from gnmr_megatron.analysis.report.locks import lock_occupancy
from gnmr_megatron.analysis.report.spikes import find_spikes
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import DecisionEvent, SelectedUnit, StepEvent, read_events
from tests.unit.control.strategies import SETTINGS, TRACES, units
from tests.unit.observability.test_events import start_event, step_event
from tools.record_synthetic_run import record

BUSY = ControlConfig(alpha=1.8, beta=1.5, delta=4, max_recovered=2, lock_steps=3, warmup_steps=10)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history") / "busy"
    locked = record(folder, num_layers=2, steps=300, config=BUSY, seed=3, shocks=0.01)
    return RecordedRun(folder), read_history(RecordedRun(folder)), locked


def selections_of(decisions):
    rows = [
        (d.step, unit, d.gnmr[unit], d.delta_gnmr[unit], d.score[unit], d.lock[unit],
         REASONS.index(d.reason(unit)))
        for d in decisions
        for unit in d.selected.tolist()
    ]  # fmt: skip
    columns = list(zip(*rows, strict=True)) or [()] * 7
    names = ("step", "unit", "gnmr", "delta_gnmr", "score", "lock", "reason")
    kinds = (np.int64, np.int64, float, float, float, np.int64, np.int64)
    return Selections(
        **{
            name: np.array(column, dtype=kind)
            for name, column, kind in zip(names, columns, kinds, strict=True)
        }
    )


@settings(max_examples=60, deadline=None)
@given(TRACES, SETTINGS, st.integers(1, 70))
def test_locks_are_those_that_the_controller_holds(trace, changes, restart):
    count, norms, updated = trace
    controller = Controller(ControlConfig(**changes), units(count))
    decisions = []
    for step, (row, flag) in enumerate(zip(norms, updated, strict=True), start=1):
        if step == restart:
            controller.restart_history()
        decisions.append(controller.decide(np.array(row), step=step, updated=flag))
    steps = np.arange(1, len(norms) + 1)
    told = lock_occupancy(selections_of(decisions), steps, restarts=[restart])
    assert told.tolist() == [int((decision.lock > 0).sum()) for decision in decisions]


def test_locks_of_a_recorded_run_are_those_of_its_controller(recorded):
    _, history, locked = recorded
    assert max(locked) > 1
    assert lock_occupancy(history.selections, history.series.step).tolist() == locked


def test_a_run_without_a_step_has_no_locks():
    assert lock_occupancy(selections_of([]), np.zeros(0, dtype=np.int64)).tolist() == []


def test_the_series_hold_what_the_events_say(recorded):
    run, history, _ = recorded
    events = [event for event in run.events(StepEvent) if isinstance(event, StepEvent)]
    series = history.series
    for name in (
        "step",
        "loss",
        "grad_norm",
        "tokens",
        "step_seconds",
        "over_threshold",
        "updated",
    ):
        assert getattr(series, name).tolist() == [getattr(event, name) for event in events]
    sets = [set(event.recovered) for event in events]
    assert series.recovered.tolist() == [len(each) for each in sets]
    switches = [0, *(len(now ^ old) for old, now in itertools.pairwise(sets))]
    assert series.switches.tolist() == switches
    best = max(events, key=lambda event: event.riskiest_score)
    assert history.riskiest == (best.step, best.riskiest_unit, best.riskiest_score)


def test_recovered_cells_are_the_flags_of_the_matrix(recorded):
    run, history, _ = recorded
    rows, columns = np.nonzero(run.matrix.recovered)
    wanted = set(zip(run.matrix.steps[rows].tolist(), columns.tolist(), strict=True))
    cells = history.recovered
    assert set(zip(cells.step.tolist(), cells.unit.tolist(), strict=True)) == wanted
    assert len(wanted) == len(cells.step) > 50


def test_spans_cover_each_recovered_cell_with_the_reason_of_its_decision(recorded):
    run, history, _ = recorded
    reasons = {
        (event.step + 1, unit.unit): unit.reason
        for event in run.events(DecisionEvent)
        for unit in event.selected
    }
    spans = recovery_spans(history)
    cells = {}
    for unit, first, last, reason in zip(
        spans.unit, spans.first, spans.last, spans.reason, strict=True
    ):
        for step in range(first, last + 1):
            assert (unit, step) not in cells
            cells[int(unit), step] = REASONS[reason]
    rows, columns = np.nonzero(run.matrix.recovered)
    steps = run.matrix.steps[rows].tolist()
    wanted = {
        (column, step): reasons[step, history.units[column]]
        for step, column in zip(steps, columns.tolist(), strict=True)
    }
    assert cells == wanted


@settings(max_examples=40, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 5), st.integers(1, 40))))
def test_no_recovered_cell_is_lost_in_spans(tmp_path_factory, cells):
    folder = tmp_path_factory.mktemp("cells")
    ids = units(6).ids
    log = EventLog(folder)
    log.append(start_event())
    for step in range(1, 41):
        recovered = [ids[unit] for unit, at in sorted(cells) if at == step]
        log.append(step_event(step, recovered=recovered))
    log.close()
    history = read_history(RecordedRun(folder))
    spans = recovery_spans(history)
    found = [
        (history.units[unit], step)
        for unit, first, last in zip(spans.unit, spans.first, spans.last, strict=True)
        for step in range(first, last + 1)
    ]
    assert sorted(found) == sorted((ids[unit], step) for unit, step in cells)
    assert set(spans.reason.tolist()) <= {UNKNOWN_REASON}


def test_spikes_are_above_six_deviations_of_the_steps_before(recorded):
    _, history, _ = recorded
    losses = history.series.loss
    wanted = [
        row
        for row in range(16, len(losses))
        if losses[row]
        > losses[max(row - 128, 0) : row].mean() + 6 * losses[max(row - 128, 0) : row].std()
    ]
    assert [spike.step for spike in find_spikes(history)] == history.series.step[wanted].tolist()


def test_a_spike_tells_what_the_controller_did_before_and_after(tmp_path):
    log = EventLog(tmp_path)
    log.append(start_event())
    for step in range(1, 61):
        spiked = 40 <= step < 43
        log.append(
            step_event(
                step,
                loss=9.0 if spiked else 2.0 + 0.01 * (step % 2),
                recovered=["b"] * (step in (35, 41, 42)),
                over_threshold=int(step in (29, 34, 40)) * 2,
                riskiest_score=4.5 if step == 40 else 0.5,
            )
        )
        if step == 40:
            unit = SelectedUnit(
                unit="b", gnmr=9.0, delta_gnmr=9.0, score=4.5, lock=3, reason="gnmr"
            )
            log.append(DecisionEvent(step=40, selected=[unit]))
    log.close()
    first, *_ = find_spikes(read_history(RecordedRun(tmp_path)))
    assert (first.step, first.loss) == (40, 9.0)
    assert (first.over_before, first.recovered_before) == (2, 1)
    assert (first.over_at, first.score_at, first.selected_at) == (2, 4.5, ("b",))
    assert (first.recovered_after, first.steps_to_return) == (2, 3)


def test_steps_out_of_order_are_refused(tmp_path):
    log = EventLog(tmp_path)
    for event in (start_event(), step_event(1), step_event(3), step_event(2)):
        log.append(event)
    log.close()
    with pytest.raises(DataError, match="step 2 stands after a later one"):
        read_history(RecordedRun(tmp_path))


def test_a_reason_of_a_later_version_is_kept_as_not_told(tmp_path):
    log = EventLog(tmp_path)
    unit = SelectedUnit(unit="a", gnmr=math.inf, delta_gnmr=1.0, score=2.0, lock=0, reason="moon")
    for event in (start_event(), step_event(1), DecisionEvent(step=1, selected=[unit])):
        log.append(event)
    log.close()
    assert read_history(RecordedRun(tmp_path)).selections.reason.tolist() == [UNKNOWN_REASON]


def test_the_synthetic_run_is_like_a_real_one(recorded):
    """Its events are read back, and its share of recovered cells is small but not zero."""
    run, history, _ = recorded
    assert [event.name for event in read_events(run.folder / "events.jsonl")][-1] == "finish"
    assert 0 < history.series.recovered.mean() < BUSY.max_recovered
    assert json.loads((run.folder / "units.json").read_text())["schema_version"] == 1
