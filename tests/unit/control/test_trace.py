import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.trace import DecisionTrace, TraceStep
from tests.unit.control.test_controller import units

GOLDEN = sorted((Path(__file__).parents[2] / "golden").glob("*.json"))


def recorded_trace():
    config = ControlConfig(
        alpha={0: 1.2, 20: 1.5}, beta=1.4, delta=3, max_recovered=2, lock_steps=2, warmup_steps=3
    )
    controller, rng = Controller(config, units(5)), np.random.default_rng(0)
    steps = []
    for step in range(1, 31):
        norms = rng.lognormal(sigma=0.4, size=5)
        if step == 12:
            norms[3] = math.inf
        decision = controller.decide(norms, step=step, updated=step != 12)
        selected = tuple(controller.units.ids[index] for index in decision.selected)
        steps.append(
            TraceStep(step=step, norms=tuple(norms.tolist()), updated=step != 12, selected=selected)
        )
    return DecisionTrace(config=config, units=controller.units, steps=tuple(steps))


def test_a_trace_survives_its_file_and_verifies(tmp_path):
    trace = recorded_trace()
    trace.write(tmp_path / "trace.json")
    again = DecisionTrace.read(tmp_path / "trace.json")
    assert again.config == trace.config
    assert again.units.ids == trace.units.ids
    assert again.steps == trace.steps
    again.verify()
    assert sum(len(step.selected) for step in trace.steps) > 10


def test_a_changed_decision_is_found_with_its_step():
    trace = recorded_trace()
    steps = list(trace.steps)
    steps[20] = dataclasses.replace(steps[20], selected=(trace.units.ids[4],))
    with pytest.raises(ValueError, match="step 21: recorded"):
        dataclasses.replace(trace, steps=tuple(steps)).verify()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_traces_are_decided_as_the_reference_did(path):
    golden = json.loads(path.read_text())
    schedules = {
        key: {int(step): value for step, value in golden["settings"][key].items()}
        for key in ("alpha", "beta", "max_recovered")
        if isinstance(golden["settings"][key], dict)
    }
    controller = Controller(
        ControlConfig(**{**golden["settings"], **schedules}),
        units(len(golden["steps"][0]["norms"])),
    )
    for number, step in enumerate(golden["steps"], start=1):
        norms = np.array([float(norm) for norm in step["norms"]])
        decision = controller.decide(norms, step=number, updated=step["updated"])
        assert decision.selected.tolist() == step["selected"]
        assert decision.lock.tolist() == step["lock"]
        for name in ("gnmr", "delta_gnmr", "score"):
            np.testing.assert_array_equal(
                getattr(decision, name), [float(value) for value in step[name]]
            )


def test_there_are_golden_traces():
    assert len(GOLDEN) >= 3
