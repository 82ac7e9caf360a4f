"""What one layout saved, every other one loads: to the bit, and it goes on as if it had saved it itself.

A layout that has loaded a checkpoint saves it again; the new one must hold the same tensors. Since that is shown for
every layout, and for checkpoints of each kind of optimizer in layouts of each kind, it holds for every pair.
"""

import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from gnmr_megatron.training.checkpoint_files import CheckpointDescription
from tests.distributed.layout_matrix import (
    ALL,
    LAYOUTS,
    PRECISIONS,
    WORLD_SIZES,
    case,
    launch,
    losses,
)

PLAIN, SHARDED = "tp2_pp2_sp", "dp2_sharded_gather"
OF_EACH_KIND = ("one", "tp2_sp", "pp2_vpp2", "dp2_sharded_overlap", "tp2_dp2_sharded", "pp4")
SAVED_STEP, LAST_STEP = 6, 12
SHORT = {"train.steps": LAST_STEP, "checkpoint.interval": SAVED_STEP, "train.eval_interval": 0}
RESAVED = [
    *(("exact", PLAIN, target) for target in ALL),
    *(("exact", SHARDED, target) for target in OF_EACH_KIND),
    *(
        ("bf16", source, target)
        for source in ("pp2", SHARDED)
        for target in ("one", "tp2", SHARDED)
    ),
]
WENT_ON = [
    ("tp2_dp2_sharded", "pp2_vpp2"),
    ("pp2_vpp2", "tp2_cp2_sp"),
    ("cp2", "tp4_sp"),
    ("dp2", "dp2_sharded_gather"),
    ("dp2_sharded_gather", "pp2_dp2"),
    ("pp4", "one"),
    ("tp2_pp2_sp", "pp2_uneven"),
]
# where each kind of optimizer keeps FP32 main parameters; a plain FP32 model is its own
MAIN = {"distributed": "optimizer.state.param.", "mixed_precision": "optimizer.state.fp32_param."}


def checkpoint(run):
    return run / f"checkpoints/step_{SAVED_STEP:08d}"


def name_of(precision, source, target, what):
    return f"{what}.{precision}.{source}.{target}"


def run_cases(world_size, cases, folder):
    chosen = [arguments for name, arguments in cases if WORLD_SIZES[name] == world_size]
    if chosen:
        launch(world_size, chosen, folder)


@pytest.fixture(scope="module")
def resharded(dataset, tmp_path_factory):
    """Folder of runs, and of those that loaded another layout's checkpoint and saved it again, or went on from it."""
    folder = tmp_path_factory.mktemp("resharded")
    wanted = [("resave", *item) for item in RESAVED]
    wanted += [("go_on", "exact", *pair) for pair in WENT_ON]
    sources = {("exact", "one")} | {(precision, source) for _, precision, source, _ in wanted}
    saving = [
        (
            name,
            case(f"{precision}.{name}", PRECISIONS[precision] | ALL[name] | SHORT, folder, dataset),
        )
        for precision, name in sorted(sources)
    ]
    for world_size in LAYOUTS:
        run_cases(world_size, saving, folder)
    loading = []
    for what, precision, source, target in wanted:
        name = name_of(precision, source, target, what)
        shutil.copytree(folder / f"{precision}.{source}", folder / name)
        settings = PRECISIONS[precision] | ALL[target] | SHORT
        settings["resume"] = checkpoint(folder / name)
        arguments = case(name, settings, folder, dataset)
        loading.append((target, ["resave", *arguments] if what == "resave" else arguments))
    for world_size in LAYOUTS:
        run_cases(world_size, loading, folder)
    return folder


def tensors(path):
    """All tensors of a checkpoint, whole, as torch itself reads them."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    content = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(content, checkpoint_id=path, no_dist=True)
    return content


def canonical(path):
    """Tensors of a checkpoint with main parameters under one name, where they are."""
    prefix = MAIN.get(CheckpointDescription.read(path).optimizer)
    found = {}
    for key, tensor in tensors(path).items():
        is_main = prefix is not None and key.startswith(prefix)
        found[f"main.{key.removeprefix(prefix)}" if is_main else key] = tensor
    if not any(key.startswith("main.") for key in found):
        weights = [key for key in found if not key.startswith("optimizer.")]
        found |= {f"main.{key}": found[key] for key in weights}
    return found


@pytest.mark.parametrize(("precision", "source", "target"), RESAVED)
def test_a_checkpoint_that_another_layout_saves_again_is_the_same(
    resharded, precision, source, target
):
    before = checkpoint(resharded / f"{precision}.{source}")
    after = checkpoint(resharded / name_of(precision, source, target, "resave"))
    assert CheckpointDescription.read(after).layout["world_size"] == WORLD_SIZES[target]
    assert CheckpointDescription.read(after).state == CheckpointDescription.read(before).state
    expected, found = canonical(before), canonical(after)
    assert found.keys() == expected.keys()
    assert len(found) == 9 * 4  # weights, main weights and two moments of each
    different = [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])]
    assert not different


@pytest.mark.parametrize(("source", "target"), WENT_ON)
def test_a_run_that_goes_on_in_another_layout_is_that_of_one_process(resharded, source, target):
    run, one = resharded / name_of("exact", source, target, "go_on"), resharded / "exact.one"
    assert len(losses(run)) == LAST_STEP
    np.testing.assert_allclose(losses(run), losses(one), rtol=1e-5)
    ours, reference = read_risk_matrix(run), read_risk_matrix(one)
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=1e-5)
    np.testing.assert_array_equal(ours.selected, reference.selected)
    assert reference.recovered[SAVED_STEP:].any()
