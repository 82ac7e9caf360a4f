"""`gnmr-megatron units`: the table of any preset, without torch and weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnmr_megatron.cli.main import main

RUNS = Path(__file__).parents[2] / "configs/runs"


def units(capsys, *arguments):
    assert main(["units", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_of_the_13b_preset_by_hand(capsys):
    table = units(capsys, RUNS / "llama2_13b.yaml")
    rows = {row["unit"]: row for row in table["units"]}
    assert len(rows) == 160
    assert rows["decoder.layers.39.mlp.linear_fc2"] == {
        "unit": "decoder.layers.39.mlp.linear_fc2",
        "shape": [5120, 13824],
        "low": "saved_int4",
        "recovery": "saved_int8",
        "fixed": False,
        "low_bytes": 13824 / 2 + 13824 / 64 * 2,  # codes, and a BF16 scale for 64 of them
        "recovery_bytes": 13824 + 13824 / 64 * 2,
    }
    assert rows["decoder.layers.0.self_attention.linear_qkv"]["shape"] == [15360, 5120]
    assert table["totals"]["exact_bytes"] == 40 * 2 * (3 * 5120 + 13824)
    # the budget of 8 goes to the widest inputs
    assert table["totals"]["most_bytes"] - table["totals"]["low_bytes"] == 8 * 13824 / 2


def test_overrides_change_the_table(capsys):
    table = units(
        capsys,
        RUNS / "quickstart.yaml",
        "--precision.first_last_k=1",
        '--precision.overrides=[{"units": "*.1.mlp.*", "low": "deepseek_fp6"}]',
    )
    rows = table["units"]
    assert [row["fixed"] for row in rows] == [True] * 4 + [False] * 8 + [True] * 4
    assert [row["low"] for row in rows[4:8]] == ["saved_int4"] * 2 + ["deepseek_fp6"] * 2
    assert table["totals"]["recoverable"] == 8


def test_ranks_that_each_keep_the_whole_input_are_counted(capsys):
    arguments = ["--parallel.tensor_model_parallel_size=2", "--model.dtype=bf16"]
    plain = units(capsys, RUNS / "quickstart.yaml", *arguments)["units"]
    split = units(
        capsys, RUNS / "quickstart.yaml", *arguments, "--parallel.sequence_parallel=true"
    )["units"]
    once = 256 / 2 + 256 / 128 * 2
    assert [row["low_bytes"] for row in split[:2]] == [once, once]
    assert [row["low_bytes"] for row in plain[:2]] == [2 * once, once]  # qkv on both ranks


def test_frozen_units_keep_nothing_and_adapters_their_inputs(capsys):
    """Of 16 units 256 or 768 wide, four have adapters of rank 8."""
    table = units(
        capsys,
        RUNS / "quickstart.yaml",
        "--model.num_layers=4",
        "--model.dtype=bf16",
        "--lora.rank=8",
        "--lora.units=['decoder.layers.[12].mlp.*']",
        "--lora.base=unread",
        "--precision.low=frozen_int8",
        "--precision.recovery=bf16",
        "--parallel.tensor_model_parallel_size=2",
        "--parallel.sequence_parallel=true",
        "--gnmr.max_recovered=2",
    )
    rows = {row["unit"]: row for row in table["units"]}
    # the input of A in BF16, once over the ranks; that of B whole on both ranks, or a half of the tokens on each
    fc1, fc2 = 2 * 256 + 2 * 8 * 2, 2 * 768 + 2 * 8
    for layer in (1, 2):
        for name, kept in (("linear_fc1", fc1), ("linear_fc2", fc2)):
            row = rows.pop(f"decoder.layers.{layer}.mlp.{name}")
            assert (row["low_bytes"], row["recovery_bytes"]) == (kept, kept)
    assert len(rows) == 12
    assert {(row["fixed"], row["low_bytes"], row["recovery_bytes"]) for row in rows.values()} == {
        (True, 0, 0)
    }
    totals = table["totals"]
    assert totals["recoverable"] == 4
    assert totals["low_bytes"] == totals["most_bytes"] == totals["exact_bytes"] == 2 * (fc1 + fc2)


@pytest.mark.parametrize(
    ("option", "most"), [("max_recovered=1000", 16), ("mode=monitor", 0), ("max_recovered=3", 3)]
)
def test_the_budget_is_what_can_be_recovered(capsys, option, most):
    totals = units(capsys, RUNS / "quickstart.yaml", f"--gnmr.{option}")["totals"]
    assert totals["max_recovered"] == most


def test_layers_that_are_alike_share_a_line(capsys):
    assert main(["units", str(RUNS / "llama2_7b.yaml")]) == 0
    text = capsys.readouterr().out
    assert text.count("decoder.layers.0..31.") == 4
    assert "128 projections, 128 recoverable, at most 4 at once" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ['--precision.overrides=[{"units": "*.mlp.fc2", "low": "bf16"}]'],
            "'*.mlp.fc2' matches no unit; nearest: decoder.layers.",
        ),
        (["--precision.low=saved_int5"], "no `saved_int5`; did you mean `saved_int"),
        (["--precision.group_size=100"], "precision.group_size: 100 does not divide 256"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, arguments, message):
    assert main(["units", str(RUNS / "quickstart.yaml"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_it_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from gnmr_megatron.cli.main import main\n"
        f"sys.exit(main(['units', {str(RUNS / 'llama2_60m.yaml')!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "decoder.layers.0..7.mlp.linear_fc2" in result.stdout


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error_to_tell(how):
    seen, written = os.pipe()
    os.close(seen)
    result = subprocess.run(
        [sys.executable, "-m", "gnmr_megatron", "units", RUNS / "llama2_13b.yaml", *how],
        stdout=written,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(written)
    assert (result.returncode, result.stderr) == (1, b"")
