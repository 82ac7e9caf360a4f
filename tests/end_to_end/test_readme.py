"""What the README tells people to type does what it says, on a smaller budget."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.precision_plan import plan_units
from gnmr_megatron.observability.events import StartEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from gnmr_megatron.precision.config import PrecisionConfig
from tests.conftest import ROOT, run_cli
from tests.references.wandb_file import history, read_records

README = (ROOT / "README.md").read_text()
SMALL = [
    "--model.hidden_size=64", "--model.ffn_hidden_size=128", "--precision.group_size=32", "--train.steps=6",
    "--train.global_batch_size=8", "--train.micro_batch_size=2", "--train.eval_samples=8", "--optimizer.warmup_steps=2",
    "--data.train_samples=1000", "--tracking.tensorboard=true", "--tracking.wandb_report=true",
]  # fmt: skip


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder in which the README's commands find what they name."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.fixture(scope="module")
def typed(clone):
    """Output of every `gnmr-megatron` line of the README, typed in order."""
    lines = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("gnmr-megatron")
    ]
    outputs = {}
    for line in lines:
        _, verb, *arguments = shlex.split(line, comments=True)
        extra = {"prepare-data": ["--max-documents", "60"], "train": SMALL}.get(verb, [])
        if "--resume" in arguments:  # all other settings are those of the run
            extra = ["--train.steps=8"]
        if verb == "prepare-data":
            arguments[arguments.index("--vocab-size") + 1] = "500"
        result = run_cli(verb, *arguments, *extra, cwd=clone)
        assert result.returncode == 0, f"{line}\n{result.stderr}"
        outputs[line] = result.stdout
    return outputs


def test_the_commands_run_in_the_order_in_which_they_stand(typed, clone):
    verbs = ["prepare-data", "train", "train", "summary", "units"]
    assert [line.split()[1] for line in typed] == verbs
    assert sorted(path.name for path in (clone / "runs").iterdir()) == ["deeper"]


def test_the_table_of_units_is_that_of_the_preset(typed):
    table = next(text for line, text in typed.items() if " units " in line)
    assert "decoder.layers.0..31.mlp.linear_fc2" in table
    assert "128 projections, 128 recoverable" in table


def test_the_example_of_overrides_means_what_its_comments_say():
    (example,) = blocks("yaml")
    settings = PrecisionConfig(**yaml.safe_load(example)["precision"])
    plans = {plan.unit.id: plan for plan in plan_units(LlamaConfig(num_layers=8), settings)}
    fixed = {name for name, plan in plans.items() if plan.is_fixed}
    assert fixed == {
        name for name in plans if "linear_proj" in name or name.split(".")[2] in ("0", "7")
    }
    assert plans["decoder.layers.5.mlp.linear_fc1"].recovery == "bf16"
    assert plans["decoder.layers.4.mlp.linear_fc1"].low == "deepseek_fp6"


def test_training_tells_what_it_did_and_what_to_do_next(typed):
    first = next(text for line, text in typed.items() if " train " in line)
    assert re.search(
        r"deeper: 4 processes \(TP 2 x PP 2\), .* 32 units, policy gnmr \(active\)", first
    )
    assert len(re.findall(r"^step +\d+/6", first, re.MULTILINE)) == 6
    for name in (
        "loss",
        "held-out",
        "recovered",
        "most often",
        "control",
        "checkpoint",
        "files",
        "try next",
    ):
        assert re.search(rf"^{name} ", first, re.MULTILINE), name
    assert "\x1b" not in first


def test_the_run_folder_holds_what_the_readme_lists(typed, clone):
    run = clone / "runs/deeper"
    for name in (
        "config.yaml",
        "events.jsonl",
        "risk_matrix.bin",
        "units.json",
        "checkpoints",
        "wandb",
    ):
        assert (run / name).exists()
    events = list(read_events(run / "events.jsonl"))
    assert [event.step for event in events if isinstance(event, StepEvent)] == list(range(1, 9))
    assert read_risk_matrix(run).norms.shape == (8, 32)
    parts = sorted((run / "wandb").glob("offline-run-*/*.wandb"))  # of one rank, of four processes
    logged = [
        [step for step, row in history(path).items() if "train/loss" in row] for path in parts
    ]
    assert logged == [[1, 2, 3, 4, 5, 6], [7, 8]]
    assert len({path.name for path in parts}) == 1
    artifacts = [
        record.artifact
        for path in parts
        for record in read_records(path)
        if record.WhichOneof("record_type") == "artifact" and record.artifact.type == "report"
    ]
    reports = [Path(entry.local_path) for a in artifacts for entry in a.manifest.contents]
    assert len(reports) == 2  # one for each attempt
    assert all(path.read_text().startswith("<!doctype html>") for path in reports)
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [scalar.step for scalar in board.Scalars("train/loss")] == list(range(1, 9))
    for line in (run / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert next(event for event in events if isinstance(event, StartEvent)).world_size == 4


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples_run(number):
    result = subprocess.run(
        [sys.executable, "-c", blocks("python")[number]],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[9] == "10 ['decoder.layers.2.mlp.linear_fc1']"


def test_the_make_targets_on_the_first_screen_exist():
    targets = re.findall(r"^make (\w+)", blocks("sh")[0], re.MULTILINE)
    assert targets == ["quickstart", "test"]
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_make_quickstart_runs_the_commands_that_the_tests_run():
    plan = subprocess.run(
        ["make", "-n", "quickstart"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert "gnmr-megatron prepare-data stdlib: --output data/stdlib --vocab-size 2048" in plan
    assert "gnmr-megatron train --config configs/runs/quickstart.yaml" in plan
