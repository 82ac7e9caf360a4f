"""tools/simulate_scale.py: its formulas against numbers worked out by hand, and a real checkpoint."""

import json
import sys

import pytest
from torch.distributed.checkpoint import FileSystemReader

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.models.config import LlamaConfig
from tests.conftest import TINY, options, run_cli
from tools import simulate_scale
from tools.simulate_scale import (
    PUBLISHED,
    WORLD_SIZES,
    all_reduce_us,
    checkpoint_bytes,
    compare_published,
    consensus_bytes,
    decide_often,
    main,
    measure_decide,
    model_all_reduce,
    saved_bytes,
    some_units,
    step_seconds,
)


@pytest.fixture(scope="module")
def result():
    return simulate_scale.simulate(steps=20)


def test_the_risk_vector_has_eight_bytes_a_unit_and_eight_for_the_rest():
    assert [consensus_bytes(units) for units in (16, 160)] == [136, 1288]


def test_all_reduce_by_hand():
    # one node: 14 hops of 0.6 us, and of 1,288 B at 38.7 / 3.8 = 10.184 GB/s, on 6.8 us
    assert all_reduce_us(1288, 8) == pytest.approx(6.8 + 14 * (0.6 + 0.1264703), rel=1e-6)
    # 128 nodes: 14 more hops of 5 us, and of 1,288 B at 36 / 3.8 = 9.474 GB/s
    assert all_reduce_us(1288, 1024) == pytest.approx(
        6.8 + 14 * (0.6 + 0.1264703) + 14 * (5 + 0.1359556), rel=1e-6
    )
    # 13 nodes take as many levels as 16
    assert all_reduce_us(4, 13 * 8) == all_reduce_us(4, 16 * 8)


def test_all_reduce_agrees_with_what_nccl_logs_of_itself():
    # github.com/NVIDIA/nccl/issues/1453, 2 x 8 H100: "64 Bytes -> Algo 0 proto 0 time 25.207382"
    assert all_reduce_us(64, 16) == pytest.approx(25.207382, rel=0.01)


def test_only_the_bytes_are_left_of_the_difference_where_the_engine_reduces_over_all_ranks():
    row = model_all_reduce(160, 1024, model_parallel=16)
    assert row["extra_us"] == pytest.approx(1284 * 14 * (3.8 / 38.7 + 3.8 / 36) / 1e3)
    # without the distributed optimizer the engine stays on 2 nodes of 128: six levels more, up and down
    assert row["extra_plain_us"] - row["extra_us"] == pytest.approx(12 * 5, rel=0.01)


def test_time_grows_with_units_and_with_ranks():
    for times in (
        [all_reduce_us(consensus_bytes(units), 1024) for units in simulate_scale.UNITS],
        [all_reduce_us(1288, world_size) for world_size in WORLD_SIZES],
        [model_all_reduce(160, size, model_parallel=16)["extra_us"] for size in WORLD_SIZES],
    ):
        assert times == sorted(times)
        assert times[0] < times[-1]


def test_step_time_by_hand():
    # 6 x 13.016e9 x 4,194,304 = 3.2755e17; 1,024 x 0.48 x 989.4e12 = 4.8631e17 a second
    assert step_seconds(13_015_864_320, 4_194_304, 1024) == pytest.approx(0.67355, rel=1e-4)


def test_presets_have_the_parameters_that_their_authors_count(result):
    sizes = {row["preset"]: row for row in result["computed"]["presets"]}
    assert list(sizes) == [f"llama2_{size}" for size in ("60m", "130m", "350m", "1b", "7b", "13b")]
    # huggingface.co/meta-llama/Llama-2-7b-hf and -13b-hf
    assert sizes["llama2_7b"]["parameters"] == 6_738_415_616
    largest = sizes["llama2_13b"]
    assert largest["parameters"] == 13_015_864_320
    assert largest["total"] == pytest.approx(14 * 13_015_864_320, rel=1e-4)
    # a step: 8 + 1 + 8 bytes, and 8 + 4 + 4 + 1 for each of 160 units
    assert largest["risk_matrix"] == 100_000 * (17 + 160 * 17)


def test_memory_is_twelve_numbers_and_a_mark_a_unit():
    held = [measure_decide(units, steps=2)["held_bytes"] for units in (10_000, 20_000)]
    # count, total, weight, lock and delta = 8 GNMR values
    assert held[1] - held[0] == pytest.approx((12 * 8 + 1) * 10_000, rel=0.01)


def test_state_in_a_checkpoint_does_not_grow_with_steps():
    early, late = (Controller(ControlConfig(), some_units(160)) for _ in range(2))
    decide_often(early, 10)
    decide_often(late, 1000)
    assert saved_bytes(late) == pytest.approx(saved_bytes(early), rel=0.05)


def test_published_latencies_are_longer_than_the_models_but_for_one_node(result):
    rows = [compare_published(sweep) for sweep in PUBLISHED]
    assert result["model"]["published"] == rows
    ratios = [row["measured_us"] / row["model_us"] for row in rows]
    assert ratios == pytest.approx([0.82, 1.38, 4.90, 3.06], abs=0.01)


def test_result_is_json_with_every_number_under_measured_computed_or_model(result):
    plain = json.loads(json.dumps(result))
    assert set(plain) == {"measured", "computed", "model"}
    assert [row["units"] for row in plain["measured"]["decide"]] == list(simulate_scale.UNITS)
    for row in plain["measured"]["decide"]:
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["median_ms"] <= row["p99_ms"]
    model = plain["model"]
    assert [row["world_size"] for row in model["all_reduce"]] == list(WORLD_SIZES)
    assert all(row["source"].startswith("https://") for row in model["constants"].values())
    step = model["step"]
    assert step["share_percent"] == pytest.approx(
        100 * (step["decide_us"] + step["extra_us"]) / (step["step_ms"] * 1e3)
    )
    assert step["share_percent"] < step["plain_share_percent"] < step["bound_percent"]


@pytest.mark.parametrize(("median_ms", "code"), [(0.1, 0), (0.3, 1)])
def test_a_bound_that_is_not_held_fails_the_command(monkeypatch, capsys, result, median_ms, code):
    decide = [dict(row, median_ms=median_ms) for row in result["measured"]["decide"]]
    changed = {**result, "measured": {"decide": decide}}
    monkeypatch.setattr(simulate_scale, "simulate", lambda steps: changed)
    monkeypatch.setattr(sys, "argv", ["simulate_scale.py", "--json"])
    assert main() == code
    assert json.loads(capsys.readouterr().out)["measured"]["decide"] == decide
    monkeypatch.setattr(sys, "argv", ["simulate_scale.py"])
    assert main() == code
    assert "MODEL: llama2_13b on 1,024 GPUs" in capsys.readouterr().out


def test_a_real_checkpoint_has_the_computed_size(dataset, tmp_path):
    settings = {
        **TINY,
        "model.hidden_size": 128,
        "model.ffn_hidden_size": 512,
        "model.dtype": "bf16",
        "precision.low": "bf16",
        "precision.recovery": "bf16",
        "optimizer.warmup_steps": 1,
        "train.steps": 2,
        "runs_dir": tmp_path,
    }
    run = run_cli("train", f'--data.datasets=["{dataset}"]', *options(settings))
    assert run.returncode == 0, run.stderr
    checkpoint = tmp_path / "run/checkpoints/step_00000002"
    model = LlamaConfig(
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
    )
    computed = checkpoint_bytes(model, vocab_size=500, ranks=1)

    tensors = [
        entry
        for entry in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.values()
        if hasattr(entry, "size")
    ]
    in_tensors = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    parts = ("weights", "main_parameters", "moments")
    assert in_tensors == sum(computed[part] for part in parts)

    on_disk = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    assert computed["total"] < on_disk < 1.03 * computed["total"]
