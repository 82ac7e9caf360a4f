"""Fine-tuning as a user does it: convert, prepare data, train in a layout of four processes, convert back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaForCausalLM

from gnmr_megatron.data.tokenizer import load_tokenizer
from gnmr_megatron.training.checkpoint_files import CheckpointDescription
from tests.conftest import TINY, options, run_cli
from tests.tiny_llama import assert_same_tensors, save_llama, save_tokenizer, tensors_of

FREE = {key: value for key, value in TINY.items() if not key.startswith("model.")}
LAYOUT = {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of transformers', the checkpoint made of it, data of its tokenizer, and a run of both."""
    folder = tmp_path_factory.mktemp("convert")
    size = save_tokenizer(folder / "hf")
    save_llama(folder / "hf", vocab_size=size, rope="llama3")
    done = run_cli(
        "convert", "hf-to-megatron", folder / "hf", "--output", folder / "llama", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    prepare = ("--tokenizer", told["tokenizer"], "--output", folder / "data", "--workers", 1)
    lines = [json.dumps({"text": f"{number} cats sat on the mat. " * 20}) for number in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    done = run_cli("prepare-data", folder / "text.jsonl", *prepare)
    assert done.returncode == 0, done.stderr
    settings = {
        **FREE, **LAYOUT, "data.datasets": f"[{folder / 'data'}]", "runs_dir": folder, "name": "tuned",
        "train.steps": 3,
    }  # fmt: skip
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    worker = [Path(__file__).with_name("convert_worker.py"), folder / "logits.pt"]
    arguments = ["--config", folder / "llama/config.yaml", *options(settings)]
    done = subprocess.run(
        [sys.executable, *command, *worker, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_logits_in_a_layout_of_four_are_those_of_transformers(world):
    found = torch.load(world / "logits.pt")
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(world / "hf")(found["tokens"]).logits
    logits = found["logits"][..., : expected.shape[-1]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_weights_that_a_layout_of_four_took_up_return_to_the_bit(world):
    done = run_cli(
        "convert", "megatron-to-hf", world / "tuned/checkpoints/step_00000000", "--output", world / "same",
        "--max-shard-size", "50MB",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same_tensors(world / "hf", world / "same")


def test_a_tuned_run_is_exported_with_the_tokenizer_and_settings_it_came_with(world):
    done = run_cli(
        "convert", "megatron-to-hf", world / "tuned", "--output", world / "tuned-hf", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert CheckpointDescription.read(world / "tuned/checkpoints/step_00000003").step == 3
    before, after = tensors_of(world / "hf"), tensors_of(world / "tuned-hf")
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    theirs, ours = (AutoTokenizer.from_pretrained(world / name) for name in ("hf", "tuned-hf"))
    assert ours.encode("the cat") == theirs.encode("the cat")
    model = LlamaForCausalLM.from_pretrained(world / "tuned-hf")
    assert model.config.max_position_embeddings == 32
    assert model.config.rope_parameters["rope_type"] == "llama3"


def test_a_run_from_scratch_is_exported_with_its_own_tokenizer(dataset, tmp_path):
    settings = {**TINY, "data.datasets": f"[{dataset}]", "runs_dir": tmp_path, "train.steps": 3}
    assert run_cli("train", *options(settings)).returncode == 0
    done = run_cli("convert", "megatron-to-hf", tmp_path / "run", "--output", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    ours = load_tokenizer(dataset / "tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("def f(x):\n    return x + 1\n", " led by a space", "\u00e9"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert model.config.vocab_size == ours.vocab_size == len(theirs)
    assert model.config.eos_token_id == theirs.eos_token_id == ours.eod
    assert model.config.max_position_embeddings == TINY["data.sequence_length"]


def test_initial_weights_of_another_model_are_refused_before_anything_starts(
    world, dataset, tmp_path
):
    arguments = ("--config", world / "llama/config.yaml", *options(FREE), f"--runs_dir={tmp_path}")
    other = run_cli(
        "train", *arguments, f"--data.datasets=[{world / 'data'}]", "--model.ffn_hidden_size=128",
        "--model.rope_scaling=linear",
    )  # fmt: skip
    assert other.returncode == 2
    assert "model.ffn_hidden_size: saved 96, now 128" in other.stderr
    assert "model.rope_scaling: saved llama3, now linear" in other.stderr
    tokenizer = run_cli(
        "train", *arguments, f"--data.datasets=[{dataset}]", "--data.tokenizer=null"
    )
    assert tokenizer.returncode == 2
    assert "tokenizer: saved " in tokenizer.stderr
    for where, message in (
        (
            world / "hf",
            "is a folder of Hugging Face's; convert it first: gnmr-megatron convert hf-to",
        ),
        (tmp_path, "is no complete checkpoint, and no run that has one"),
    ):
        refused = run_cli(
            "train", *arguments, f"--data.datasets=[{world / 'data'}]", f"--init_from={where}"
        )
        assert refused.returncode == 2
        assert message in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_converted_checkpoint_is_verified_but_not_resumed(world):
    before = (world / "llama/config.yaml").read_text()
    assert yaml.safe_load(before)["init_from"] == str(world / "llama")
    assert f"{world / 'llama'}: whole" in run_cli("checkpoint", "verify", world / "llama").stdout
    done = run_cli("train", "--resume", world / "llama", f"--data.datasets=[{world / 'data'}]")
    assert done.returncode == 1
    assert "holds weights only" in done.stderr
    assert (world / "llama/config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf-to-megatron", "nowhere", "--output", "out"), "nowhere: is no folder"),
        (("megatron-to-hf", "nowhere", "--output", "out"), "nowhere: is no complete checkpoint"),
        (
            ("megatron-to-hf", "nowhere", "--output", "out", "--max-shard-size", "5"),
            "--max-shard-size: '5' must be a size such as",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tmp_path):
    done = run_cli("convert", *arguments, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
