"""`gnmr-megatron launch`: the plan against megatron-core's own placement, and what it warns of."""

import json

import numpy as np
import pytest
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.launch_check import data_hash, differences
from gnmr_megatron.training.launch_plan import LaunchPlan
from tests.conftest import run_cli

SIZES = [(2, 1, 2, 2), (4, 1, 3, 2), (1, 1, 5, 4), (8, 1, 1, 1)]
SIZES += [(2, 2, 3, 2), (1, 4, 2, 3)]
LARGE = [
    *("--config", "configs/runs/llama2_13b.yaml", "--parallel.tensor_model_parallel_size", 8),
    *("--parallel.pipeline_model_parallel_size", 4, "--train.micro_batch_size", 1),
]


def layout(tp, cp, pp, virtual=None, **uneven):
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=cp,
        **uneven,
    )


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), SIZES)
def test_ranks_have_the_coordinates_that_megatron_gives_them(tp, cp, dp, pp):
    world = tp * cp * dp * pp
    plan = LaunchPlan(RunConfig(parallel=layout(tp, cp, pp)), 1, world, ())
    places = [plan.place(rank) for rank in range(world)]
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for axis in ("tp", "cp", "dp", "pp"):
        for group in generator.get_ranks(axis):
            assert [getattr(places[rank], axis) for rank in group] == list(range(len(group)))


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("pp", "virtual", "uneven", "sizes"),
    [
        (1, None, {}, [12]),
        (4, None, {}, [3, 3, 3, 3]),
        (2, 3, {}, [6, 6]),
        (4, None, {FIRST: 2, LAST: 2}, [2, 4, 4, 2]),
        (3, 2, {LAST: 4}, [4, 4, 4]),
        (2, None, {FIRST: 5}, [5, 7]),
    ],
)
def test_stages_hold_the_layers_that_megatron_gives_them(pp, virtual, uneven, sizes):
    model = LlamaConfig(num_layers=12)
    parallel = layout(1, 1, pp, virtual, **uneven)
    plan = LaunchPlan(RunConfig(model=model, parallel=parallel), 1, pp, ())
    engine = TransformerConfig(
        num_layers=12,
        hidden_size=64,
        num_attention_heads=8,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=np.float32,
        **uneven,
    )
    for row, size in zip(plan.stages(), sizes, strict=True):
        first = [
            get_transformer_layer_offset(
                engine, vp_stage=None if virtual is None else chunk, pp_rank=row["stage"]
            )
            for chunk in range(virtual or 1)
        ]
        assert [start for start, _ in row["layers"]] == first
        assert sum(last - start + 1 for start, last in row["layers"]) == size
        assert row["units"] == row["projections"] == 4 * size


def test_a_thousand_ranks_stay_readable_and_json_has_them_all():
    result = run_cli("launch", *LARGE, "--nodes", 128, "--nproc-per-node", 8, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) < 30
    assert "96..127   0..7         768..1023   0..7   0    0..31   3" in result.stdout
    result = run_cli("launch", *LARGE, "--nodes", 128, "--nproc-per-node", 8, "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert [place["rank"] for place in plan["ranks"]] == list(range(1024))
    assert plan["ranks"][777] == {
        "rank": 777,
        "node": 97,
        "local_rank": 1,
        "tp": 1,
        "cp": 0,
        "dp": 1,
        "pp": 3,
    }
    assert plan["batch"]["microbatches"] * 32 * plan["batch"]["micro_batch_size"] == 1024
    assert plan["batch"]["tokens"] == 1024 * 4096
    assert len(plan["commands"]) == 128
    assert plan["commands"][0][:3] == ["torchrun", "--nnodes", "128"]


def test_tensor_parallel_groups_over_nodes_and_a_short_pipeline_are_warned_of():
    arguments = [*LARGE, "--train.global_batch_size", 2, "--train.eval_samples", 2]
    result = run_cli("launch", *arguments, "--nodes", 8, "--nproc-per-node", 4, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "tensor-parallel groups cross nodes: 8 neighbouring ranks on nodes of 4" in result.stdout
    assert "the pipeline is never full: 2 microbatches for 4 stages" in result.stdout
    assert "the size of the vocabulary is not checked: data/web" in result.stdout


def test_an_impossible_layout_and_missing_data_are_refused():
    result = run_cli("launch", *LARGE, "--nodes", 3, "--nproc-per-node", 8, "--dry-run")
    assert result.returncode == 2
    assert "24 processes cannot hold replicas of 32" in result.stderr
    result = run_cli("launch", "--data.datasets", "[nowhere]")
    assert result.returncode == 2
    assert "nowhere: is no prepared dataset" in result.stderr


def test_the_status_of_a_run_that_never_started_is_none(tmp_path):
    assert run_cli("launch", "--runs_dir", tmp_path, "--status").stdout == "none\n"
    assert not list(tmp_path.iterdir())


def test_the_hash_of_data_sees_index_manifest_size_and_both_ends_of_the_tokens(tmp_path):
    files = {".idx": b"index" * 9, ".bin": bytes(5 << 20)}
    for ending, content in files.items():
        (tmp_path / f"text{ending}").write_bytes(content)
    (tmp_path / "manifest.json").write_text("{}")
    whole = data_hash(tmp_path / "text")

    def changed(name, content):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        result = data_hash(tmp_path / "text")
        (tmp_path / name).write_bytes(before)
        return result != whole

    def flipped(position):
        tokens = bytearray(files[".bin"])
        tokens[position] = 1
        return bytes(tokens)

    assert changed("text.idx", b"index" * 8 + b"jndex")
    assert changed("manifest.json", b"{ }")
    assert changed("text.bin", files[".bin"] + b"\0")
    assert changed("text.bin", flipped((1 << 20) - 1))
    assert changed("text.bin", flipped(-(1 << 20)))
    assert not changed("text.bin", flipped(2 << 20))  # as documented: the middle is not read


def test_differences_name_the_commonest_value_first_and_few_of_many_nodes():
    reports = [(f"n{number}", {"torch": "2", "seed": "1"}) for number in range(7)]
    reports[3] = ("n3", {"torch": "2", "seed": "5"})
    reports[6] = ("n6", {"torch": "2"})
    assert list(differences(reports)) == [
        "seed: 1 on n0, n1, n2, n4 and 1 more; 5 on n3; absent on n6"
    ]
