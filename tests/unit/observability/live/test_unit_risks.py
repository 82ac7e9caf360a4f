import dataclasses

import numpy as np
import pytest

from gnmr_megatron import ControlConfig, Controller, Unit, UnitTable
from gnmr_megatron.observability.live.progress import RunProgress
from gnmr_megatron.observability.live.unit_risks import UnitRisks
from gnmr_megatron.observability.risk_matrix import MATRIX, RiskMatrixWriter
from tests.unit.observability.test_events import start_event, step_event

UNITS = UnitTable(
    Unit(layer, 0, f"decoder.layers.{layer}.mlp.linear_fc1", (8, 4)) for layer in range(6)
)
CONTROL = ControlConfig(
    alpha={1: 1.5, 20: 1.1}, beta=1.2, delta=2, warmup_steps=3, max_recovered=2, collapse_ratio=0.6
)


@pytest.fixture
def recorded(tmp_path):
    """A folder with the matrix of twelve steps, and the decision after the last one."""
    controller, writer = Controller(CONTROL, UNITS), RiskMatrixWriter(tmp_path, UNITS)
    random = np.random.default_rng(3)
    for step in range(1, 13):
        norms = random.lognormal(size=6)
        recovered = controller.recovery_set
        decision = controller.decide(norms, step=step)
        writer.append(
            step=step,
            updated=True,
            global_norm=1.0,
            norms=norms,
            gnmr=decision.gnmr,
            delta_gnmr=decision.delta_gnmr,
            recovered=recovered,
            selected=decision.selected,
        )
    writer.close()
    return tmp_path, decision, recovered


def progress_of(control=CONTROL, policy="gnmr"):
    progress = RunProgress()
    plain = None if control is None else dataclasses.asdict(control)
    progress.add(start_event(control=plain, policy=policy))
    progress.add(step_event(12, riskiest_unit="a", riskiest_score=1.5, recovered=["a"]))
    return progress


def test_scores_are_those_that_the_controller_had(recorded):
    folder, decision, recovered = recorded
    risks = UnitRisks(folder).riskiest(progress_of(), 6)
    order = np.argsort(-decision.score)
    assert [risk.unit for risk in risks] == [UNITS.ids[index] for index in order]
    assert [risk.score for risk in risks] == pytest.approx(decision.score[order], rel=1e-6)
    assert {r.unit for r in risks if r.is_recovered} == {UNITS.ids[i] for i in recovered}
    assert {r.unit for r in risks if r.is_selected} == {UNITS.ids[i] for i in decision.selected}


def test_only_the_first_few_are_given(recorded):
    assert len(UnitRisks(recorded[0]).riskiest(progress_of(), 2)) == 2


def test_half_a_record_is_passed_over(recorded):
    folder = recorded[0]
    before = UnitRisks(folder).riskiest(progress_of(), 6)
    with (folder / MATRIX).open("ab") as file:
        file.write(b"\x07" * 20)
    assert UnitRisks(folder).riskiest(progress_of(), 6) == before


@pytest.mark.parametrize("progress", [progress_of(policy="zscore"), progress_of(control=None)])
def test_the_event_tells_one_unit_where_the_matrix_cannot(recorded, progress):
    (risk,) = UnitRisks(recorded[0]).riskiest(progress, 6)
    assert (risk.unit, risk.score, risk.is_recovered) == ("a", 1.5, True)


def test_a_folder_without_a_matrix_is_no_error(tmp_path):
    assert [risk.unit for risk in UnitRisks(tmp_path).riskiest(progress_of(), 6)] == ["a"]
    assert UnitRisks(tmp_path).riskiest(RunProgress(), 6) == []
