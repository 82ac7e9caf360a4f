import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.trace import DecisionTrace, TraceStep
from tests.golden.make import TRACES as GOLDEN_SETTINGS
from tests.golden.make import main as make_golden_traces
from tests.unit.control.strategies import POLICIES, SETTINGS, TRACES, units

GOLDEN = Path(__file__).parents[2] / "golden"


def record(config, count, norms, updated):
    """The trace of a controller."""
    controller, steps = Controller(config, units(count)), []
    for step, (row, flag) in enumerate(zip(norms, updated, strict=True), start=1):
        decision = controller.decide(np.array(row), step=step, updated=flag)
        selected = tuple(controller.units.ids[index] for index in decision.selected)
        steps.append(TraceStep(step=step, norms=tuple(row), updated=flag, selected=selected))
    return DecisionTrace(config=config, units=controller.units, steps=tuple(steps))


def busy_trace():
    config = ControlConfig(
        alpha={0: 1.2, 20: 1.5}, beta=1.4, delta=3, max_recovered=2, lock_steps=2, warmup_steps=3
    )
    norms = np.random.default_rng(0).lognormal(sigma=0.4, size=(30, 5))
    norms[11, 3] = math.inf
    return record(config, 5, norms.tolist(), [step != 12 for step in range(1, 31)])


def plain(trace):
    """Everything in a trace; as text, since NaN does not equal itself."""
    return repr((trace.config, tuple(trace.units), trace.steps))


@given(trace=TRACES, config=SETTINGS, policy=st.sampled_from(POLICIES))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_trace_survives_its_file_and_verifies(trace, config, policy, tmp_path):
    written = record(ControlConfig(**config, policy=policy), *trace)
    written.write(tmp_path / "trace.json")
    json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    read = DecisionTrace.read(tmp_path / "trace.json")
    assert plain(read) == plain(written)
    assert read.units.fingerprint == written.units.fingerprint
    read.verify()


CHANGES = {
    "another unit": lambda selected, ids: (
        next(i for i in ids if i not in selected),
        *selected[1:],
    ),
    "one less": lambda selected, ids: selected[:-1],
    "one more": lambda selected, ids: (*selected, next(i for i in ids if i not in selected)),
    "another order": lambda selected, ids: selected[::-1],
    "an unknown unit": lambda selected, ids: ("elsewhere", *selected[1:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_decision_is_found_with_its_step(change):
    trace = busy_trace()
    full = [index for index, step in enumerate(trace.steps) if len(step.selected) == 2]
    assert len(full) > 5
    for index in full:
        steps = list(trace.steps)
        selected = CHANGES[change](steps[index].selected, trace.units.ids)
        steps[index] = dataclasses.replace(steps[index], selected=selected)
        with pytest.raises(ValueError, match=f"^step {steps[index].step}: recorded"):
            dataclasses.replace(trace, steps=tuple(steps)).verify()


def test_changed_norms_are_found_by_the_decisions_that_follow_from_them():
    trace = busy_trace()
    steps = list(trace.steps)
    steps[9] = dataclasses.replace(steps[9], norms=(50.0,) * 5)
    with pytest.raises(ValueError, match=r"^step \d+: recorded"):
        dataclasses.replace(trace, steps=tuple(steps)).verify()


def test_other_settings_do_not_verify():
    trace = busy_trace()
    with pytest.raises(ValueError, match="recorded"):
        dataclasses.replace(
            trace, config=dataclasses.replace(trace.config, max_recovered=1)
        ).verify()


@pytest.mark.parametrize("name", GOLDEN_SETTINGS)
def test_golden_traces_verify(name):
    DecisionTrace.read(GOLDEN / f"{name}.json").verify()


@pytest.mark.parametrize("name", GOLDEN_SETTINGS)
def test_golden_traces_are_decided_as_the_reference_did(name):
    trace = DecisionTrace.read(GOLDEN / f"{name}.json")
    expected = json.loads((GOLDEN / f"{name}.expected.json").read_text())["steps"]
    controller = Controller(trace.config, trace.units)
    for step, numbers in zip(trace.steps, expected, strict=True):
        decision = controller.decide(np.array(step.norms), step=step.step, updated=step.updated)
        assert tuple(trace.units.ids[unit] for unit in decision.selected) == step.selected
        for key, values in numbers.items():
            # float64 sums in the order of the steps: equal to the last bit
            assert getattr(decision, key).tolist() == [float(value) for value in values], key


def test_golden_files_are_what_their_maker_makes_and_hold_what_they_promise(tmp_path):
    make_golden_traces(tmp_path)
    names = sorted(path.name for path in GOLDEN.glob("*.json"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2 * len(GOLDEN_SETTINGS)
    for name in names:
        assert (GOLDEN / name).stat().st_size < 60_000
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (GOLDEN, tmp_path))
        assert ours.keys() == theirs.keys()
        assert len(ours["steps"]) == len(theirs["steps"]) == 60
    for name in GOLDEN_SETTINGS:
        trace = DecisionTrace.read(GOLDEN / f"{name}.json")
        assert sum(len(step.selected) for step in trace.steps) >= 20
        assert any(not step.updated for step in trace.steps)
        assert any(math.isinf(norm) for step in trace.steps for norm in step.norms)
