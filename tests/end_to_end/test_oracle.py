"""Recovery gaps: the same in any layout, without a trace in training; and the policy that goes by them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from gnmr_megatron.observability.events import RecoveryGapEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import ROOT, TINY, options, run_cli

LOW = {"precision.low": "saved_int2", "precision.recovery": "saved_int8"}
TP2 = {"parallel.tensor_model_parallel_size": 2}

BOTH_WAYS = """
import json, sys
import numpy as np
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.setup import set_up

config, _ = parse_run(run_parser("test", description="", epilog=""), sys.argv[1:])
trainer = set_up(config)
batches, oracle = trainer.batches.next_step(), trainer.oracle
told = []
for is_separable in (True, False):
    oracle._is_separable = is_separable
    gaps = oracle.measure(1, batches)
    told.append({"gaps": gaps.per_unit.tolist(), "error": gaps.error, "reference": gaps.reference})

# the same by hand: one unit's weight gradient on its two paths
name = "decoder.layers.1.mlp.linear_fc1"
linear = dict(trainer.step.model.chunks[0].module.named_modules())[name]
def gradient(recovered):
    trainer.step.switchboard.try_out(recovered, 1)
    trainer.step.model.zero_grad_buffers()
    trainer.step.model.forward_backward(batches)
    return linear.weight.main_grad.double().clone()
by_hand = float((gradient(()) - gradient((name,))).square().sum())
print(json.dumps({"told": told, "by_hand": by_hand, "column": trainer.units.index(name)}))
"""


def settings(dataset, runs_dir, **changes):
    return options(
        {**TINY, **LOW, "data.datasets": f"[{dataset}]", "runs_dir": runs_dir, "train.steps": 9, **changes}
    )  # fmt: skip


def taken(dataset, runs_dir, **changes):
    result = run_cli("train", *settings(dataset, runs_dir, **changes))
    assert result.returncode == 0, result.stderr
    return runs_dir / "run"


def of(run, kind):
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


@pytest.fixture(scope="module")
def measured(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    return taken(dataset, folder, **{"train.oracle_interval": 4})


def test_two_passes_give_what_a_pass_for_each_unit_gives(dataset, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", BOTH_WAYS, *settings(dataset, tmp_path, **{"train.oracle_interval": 1})],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    quick, slow = found["told"]
    np.testing.assert_allclose(quick["gaps"], slow["gaps"], rtol=1e-6, atol=1e-9 * quick["error"])
    assert sum(quick["gaps"]) == pytest.approx(quick["error"], rel=1e-9)
    assert quick["gaps"][found["column"]] == pytest.approx(found["by_hand"], rel=1e-9)
    assert 0 < quick["error"] < quick["reference"]


def test_measuring_leaves_no_trace_in_training(dataset, measured, tmp_path):
    plain = taken(dataset, tmp_path)
    assert [e.loss for e in of(plain, StepEvent)] == [e.loss for e in of(measured, StepEvent)]
    np.testing.assert_array_equal(read_risk_matrix(plain).norms, read_risk_matrix(measured).norms)
    assert [event.step for event in of(measured, RecoveryGapEvent)] == [1, 5, 9]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_units_whose_paths_are_the_same_have_no_gap_in_any_step(dataset, tmp_path, dtype):
    same = {"precision.low": dtype, "precision.recovery": dtype, "model.dtype": dtype}
    run = taken(dataset, tmp_path, **same, **{"train.oracle_interval": 1, "gnmr.mode": "monitor"})
    steps, gaps = of(run, StepEvent), of(run, RecoveryGapEvent)
    assert len(steps) == len(gaps) == 9
    assert [gap.error for gap in gaps] == [0.0] * 9
    squares = [step.grad_norm**2 for step in steps]
    np.testing.assert_allclose([gap.reference for gap in gaps], squares, rtol=1e-5)


def test_passes_draw_the_dropout_of_the_step_and_leave_it_as_it_was(dataset, tmp_path):
    base = taken(dataset, tmp_path / "base", **{"train.steps": 3})
    adapters = {
        "lora.rank": 2, "lora.base": base, "lora.dropout": 0.3, "optimizer.lr": 1e-2,
        "precision.low": "fp32", "precision.recovery": "fp32", "gnmr.mode": "monitor",
    }  # fmt: skip
    plain = taken(dataset, tmp_path / "plain", **adapters)
    measured = taken(dataset, tmp_path / "measured", **adapters, **{"train.oracle_interval": 2})
    assert [e.loss for e in of(plain, StepEvent)] == [e.loss for e in of(measured, StepEvent)]
    assert [gap.error for gap in of(measured, RecoveryGapEvent)] == [0.0] * 5


def test_ranks_that_share_the_units_measure_the_same(dataset, measured, tmp_path):
    split = taken(dataset, tmp_path, **TP2, **{"train.oracle_interval": 4})
    for ours, theirs in zip(
        of(split, RecoveryGapEvent), of(measured, RecoveryGapEvent), strict=True
    ):
        np.testing.assert_allclose(ours.gaps, theirs.gaps, rtol=1e-3)
        assert ours.error == pytest.approx(theirs.error, rel=1e-4)


def test_the_policy_recovers_in_a_step_what_helps_most_in_it(dataset, tmp_path):
    run = taken(dataset, tmp_path, **{"gnmr.policy": "oracle", "train.oracle_interval": 2})
    matrix = read_risk_matrix(run)
    gaps = {event.step: np.array(event.gaps) for event in of(run, RecoveryGapEvent)}
    assert sorted(gaps) == [1, 3, 5, 7, 9]
    for step in range(1, 10):
        best = np.argsort(-gaps[step - (step - 1) % 2], kind="stable")[:3]
        assert np.flatnonzero(matrix.recovered[step - 1]).tolist() == sorted(best.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gnmr.policy": "oracle"}, "gnmr.policy: oracle needs train.oracle_interval"),
        ({"gnmr.mode": "disabled", "train.oracle_interval": 2}, "train.oracle_interval: needs units"),
    ],
)  # fmt: skip
def test_an_oracle_that_could_not_measure_is_refused(dataset, tmp_path, changes, message):
    result = run_cli("train", *settings(dataset, tmp_path, **changes))
    assert result.returncode == 2
    assert message in result.stderr
