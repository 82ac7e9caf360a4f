"""Every layout trains as one process does: the same losses, the same norms, the same recovery sets.

With exact paths everything agrees to 1e-5. With INT4 a rounding of the last bit in an activation can move a code by a
whole step, so norms get more room; losses and recovery sets still agree.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gnmr_megatron.observability.events import StartEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import TINY, options

TP2 = {"parallel.tensor_model_parallel_size": 2}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
SHARDED = {"parallel.use_distributed_optimizer": "true", "parallel.overlap_grad_reduce": "true"}
LAYOUTS = {
    1: {"one": {}},
    2: {
        "tp2": TP2,
        "tp2_sp": {**TP2, "parallel.sequence_parallel": "true"},
        "pp2": PP2,
        "pp2_vpp2": {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2},
        "dp2": {},
        "dp2_sharded": {**SHARDED, "parallel.overlap_param_gather": "true"},
    },
    4: {
        "tp2_pp2_sp": {**TP2, **PP2, "parallel.sequence_parallel": "true"},
        "tp2_dp2_sharded": {**TP2, **SHARDED},
    },
}
PRECISIONS = {
    "exact": {"precision.low": "fp32", "precision.recovery": "fp32"},
    "int4": {"precision.low": "saved_int4", "precision.recovery": "saved_int8"},
    "tied": {"precision.low": "fp32", "precision.recovery": "fp32", "model.tie_embeddings": "true"},
    "bf16": {"precision.low": "bf16", "precision.recovery": "bf16", "model.dtype": "bf16"},
    # blocks of 32 values never cross the shards
    "mx": {
        "precision.low": "fp6_e3m2",
        "precision.recovery": "fp8_e4m3",
        "precision.granularity": "mx",
    },
    # a scale spans the whole sequence, but not the features of other ranks
    "fp8": {"precision.low": "torch_fp8_tensorwise", "precision.recovery": "bf16"},
}
RECOMPUTED = ("saved_int4", "fp4_e2m1", "deepseek_fp6", "torch_fp8_rowwise")
INT4 = PRECISIONS["int4"]
MODES = {  # on one process
    "static_low": {"gnmr.policy": "static_low"},
    "static_high": {"gnmr.policy": "static_high"},
    "monitor": {"gnmr.mode": "monitor"},
    "disabled": {"gnmr.mode": "disabled"},
    "replay": {"gnmr.policy": "replay", "gnmr.trace": "int4.one"},
    "all_int8": {"precision.low": "saved_int8"},
    **{
        f"{path}.{recompute}": {
            "precision.low": path,
            "precision.rounding": "stochastic",
            "precision.group_size": 16,
            "train.recompute": recompute,
            "train.steps": 6,
        }
        for path in RECOMPUTED
        for recompute in ("none", "core_attn", "full")
    },
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts if name != "one"]
CHECKED = {
    "exact": NAMES,
    "int4": NAMES,
    "tied": ["pp2", "tp2_pp2_sp"],
    "bf16": ["tp2", "pp2", "dp2_sharded"],
    "mx": ["tp2_sp", "pp2", "dp2_sharded", "tp2_pp2_sp"],
    "fp8": ["tp2", "tp2_sp", "pp2"],
}
PAIRS = [
    (precision, layout)
    for precision, layouts in CHECKED.items()
    for layout in layouts
    if (precision, layout) not in {("fp8", "tp2"), ("fp8", "tp2_sp")}
]
TOLERANCES = {
    "exact": (1e-5, 1e-5),
    "tied": (1e-5, 1e-5),
    "int4": (1e-5, 3e-3),
    "bf16": (5e-3, 5e-2),
    "mx": (1e-4, 1e-2),
    "fp8": (1e-5, 1e-5),
}


@pytest.fixture(scope="session")
def runs(dataset, tmp_path_factory):
    """Run folder of every (precision, layout); three launches in all."""
    folder = tmp_path_factory.mktemp("layouts")
    for world_size, layouts in LAYOUTS.items():
        cases = [
            options(
                {
                    **TINY,
                    **precision,
                    **layout,
                    "data.datasets": f"[{dataset}]",
                    "runs_dir": folder,
                    "name": f"{precision_name}.{name}",
                }
            )
            for precision_name, precision in PRECISIONS.items()
            for name, layout in layouts.items()
            if name == "one" or name in CHECKED[precision_name]
        ]
        if world_size == 1:
            cases += [mode_case(name, dataset, folder) for name in MODES]
        launch(world_size, cases, folder / f"cases_{world_size}.json")
    return folder


def mode_case(name, dataset, folder):
    settings = {
        **TINY,
        **INT4,
        **MODES[name],
        "data.datasets": f"[{dataset}]",
        "runs_dir": folder,
        "name": name,
    }
    if "gnmr.trace" in settings:
        settings["gnmr.trace"] = folder / settings["gnmr.trace"]
    return options(settings)


def launch(world_size, cases, cases_file):
    cases_file.write_text(json.dumps(cases))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world_size}",
    ]
    result = subprocess.run(
        [*command, Path(__file__).with_name("worker.py"), cases_file],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]


def losses(run):
    return np.array(
        [event.loss for event in read_events(run / "events.jsonl") if isinstance(event, StepEvent)]
    )


@pytest.mark.parametrize(("precision", "layout"), PAIRS)
def test_losses_and_norms_equal_those_of_one_process(runs, precision, layout):
    loss_tolerance, norm_tolerance = TOLERANCES[precision]
    one, run = runs / f"{precision}.one", runs / f"{precision}.{layout}"
    np.testing.assert_allclose(losses(run), losses(one), rtol=loss_tolerance)
    ours, reference = read_risk_matrix(run), read_risk_matrix(one)
    assert ours.units == reference.units
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=norm_tolerance)
    np.testing.assert_allclose(ours.global_norm, reference.global_norm, rtol=norm_tolerance)


@pytest.mark.parametrize(("precision", "layout"), [pair for pair in PAIRS if pair[0] != "bf16"])
def test_recovery_sets_are_those_of_one_process(runs, precision, layout):
    ours, reference = (read_risk_matrix(runs / f"{precision}.{name}") for name in (layout, "one"))
    np.testing.assert_array_equal(ours.selected, reference.selected)
    np.testing.assert_array_equal(ours.recovered, reference.recovered)
    assert reference.recovered.sum() >= 10  # the comparison is about something


def test_the_layouts_were_really_used(runs):
    for world_size, layouts in LAYOUTS.items():
        for name in layouts:
            start = next(
                e
                for e in read_events(runs / f"int4.{name}/events.jsonl")
                if isinstance(e, StartEvent)
            )
            assert start.world_size == world_size
            assert start.num_units == 16


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recovered_units_are_those_selected_one_step_before(runs, precision):
    matrix = read_risk_matrix(runs / f"{precision}.one")
    np.testing.assert_array_equal(matrix.recovered[1:], matrix.selected[:-1])
    assert not matrix.recovered[0].any()
    assert matrix.selected.sum(axis=1).max() <= TINY["gnmr.max_recovered"]


def test_monitoring_decides_and_trains_as_without_control(runs):
    monitor, static = (read_risk_matrix(runs / name) for name in ("monitor", "static_low"))
    assert monitor.selected.any()
    assert not monitor.recovered.any()
    np.testing.assert_array_equal(losses(runs / "monitor"), losses(runs / "static_low"))
    np.testing.assert_array_equal(monitor.norms, static.norms)


def test_without_control_the_engines_own_norm_clips_alike(runs):
    np.testing.assert_allclose(losses(runs / "disabled"), losses(runs / "static_low"), rtol=1e-6)
    assert not (runs / "disabled/risk_matrix.bin").exists()
    norms = [
        e.grad_norm for e in read_events(runs / "disabled/events.jsonl") if isinstance(e, StepEvent)
    ]
    np.testing.assert_allclose(norms, read_risk_matrix(runs / "static_low").global_norm, rtol=1e-5)


def test_replay_of_a_recorded_run_is_that_run(runs):
    np.testing.assert_array_equal(losses(runs / "replay"), losses(runs / "int4.one"))
    ours, recorded = (read_risk_matrix(runs / name) for name in ("replay", "int4.one"))
    np.testing.assert_array_equal(ours.recovered, recorded.recovered)


def test_static_high_trains_as_if_its_recovery_path_were_the_only_one(runs):
    matrix = read_risk_matrix(runs / "static_high")
    assert matrix.recovered.all()
    np.testing.assert_array_equal(matrix.norms[0], read_risk_matrix(runs / "all_int8").norms[0])
    assert (matrix.norms[0] != read_risk_matrix(runs / "static_low").norms[0]).any()


def test_scales_of_a_tensor_cover_the_whole_sequence_in_sequence_parallelism(runs):
    """What sequence parallelism splits is quantised as if it were whole."""
    ours, reference = (runs / f"fp8.{name}" for name in ("tp2_sp", "tp2"))
    np.testing.assert_allclose(losses(ours), losses(reference), rtol=1e-5)
    ours, reference = read_risk_matrix(ours), read_risk_matrix(reference)
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=3e-3)
    np.testing.assert_array_equal(ours.selected, reference.selected)


@pytest.mark.parametrize("path", RECOMPUTED)
@pytest.mark.parametrize("recompute", ["core_attn", "full"])
def test_recompute_changes_no_bit(runs, path, recompute):
    """Stochastic rounding included: the second forward of a microbatch rounds as its first."""
    plain, recomputed = runs / f"{path}.none", runs / f"{path}.{recompute}"
    np.testing.assert_array_equal(losses(recomputed), losses(plain))
    ours, reference = read_risk_matrix(recomputed), read_risk_matrix(plain)
    np.testing.assert_array_equal(ours.norms, reference.norms)
    assert reference.recovered.any()
