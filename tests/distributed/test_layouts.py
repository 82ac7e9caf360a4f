"""Every layout trains as one process does: the same losses, the same norms, the same recovery sets.

With exact paths everything agrees to 1e-5; `layout_matrix` as a program shows it over 60 steps. With INT4 a rounding of
the last bit in an activation can move a code by a whole step, so norms get more room; losses and recovery sets still
agree.
"""

import numpy as np
import pytest

from gnmr_megatron.observability.events import StartEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import TINY
from tests.distributed.layout_matrix import (
    INSTRUCTION,
    INSTRUCTION_STEPS,
    LONG_RUNS,
    PAIRS,
    PRECISIONS,
    RECOMPUTED,
    TESTED_STEPS,
    WORLD_SIZES,
    compare,
    losses,
)

pytestmark = pytest.mark.timeout(1800)  # the launches, on a busy machine

# scales of a tensor are of a rank's features, so tensor parallelism changes them
SAME = [pair for pair in PAIRS if pair not in {("fp8", "tp2"), ("fp8", "tp2_sp")}]
TOLERANCES = {
    "exact": (1e-5, 1e-5),
    "tied": (1e-5, 1e-5),
    "int4": (1e-5, 3e-3),
    "bf16": (5e-3, 5e-2),
    "mx": (1e-4, 1e-2),
    "fp8": (1e-5, 1e-5),
}


@pytest.mark.parametrize(("precision", "layout"), SAME)
def test_losses_and_norms_equal_those_of_one_process(runs, precision, layout):
    loss_tolerance, norm_tolerance = TOLERANCES[precision]
    found = compare(runs / f"{precision}.{layout}", runs / f"{precision}.one")
    assert found.losses <= loss_tolerance
    assert found.held_out <= loss_tolerance
    assert found.norms <= norm_tolerance


@pytest.mark.parametrize(("precision", "layout"), [pair for pair in SAME if pair[0] != "bf16"])
def test_recovery_sets_are_those_of_one_process(runs, precision, layout):
    found = compare(runs / f"{precision}.{layout}", runs / f"{precision}.one")
    assert found.same_traces
    is_long = precision in LONG_RUNS
    assert found.steps == (TESTED_STEPS if is_long else TINY["train.steps"])
    assert found.recovered >= (20 if is_long else 10)  # the comparison is about something


@pytest.mark.parametrize(("precision", "layout"), PAIRS)
def test_the_layouts_were_really_used(runs, precision, layout):
    events = read_events(runs / f"{precision}.{layout}/events.jsonl")
    start = next(event for event in events if isinstance(event, StartEvent))
    assert start.world_size == WORLD_SIZES[layout]
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


@pytest.mark.parametrize(
    "layout", [name for layouts in INSTRUCTION.values() for name in layouts if name != "one"]
)
def test_packed_examples_train_alike_in_every_layout(runs, layout):
    """Each completion token counts alike, whichever rank and microbatch it comes to."""
    found = compare(runs / f"instruction.{layout}", runs / "instruction.one")
    assert found.steps == INSTRUCTION_STEPS
    assert max(found.losses, found.held_out, found.norms) <= 1e-5
