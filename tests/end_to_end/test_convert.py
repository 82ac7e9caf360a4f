"""Fine-tuning as a user does it: convert, prepare data, train in a layout of four processes, convert back."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from gnmr_megatron.cli.main import main
from gnmr_megatron.data.tokenizer import load_tokenizer
from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.training.checkpoint_files import CheckpointDescription
from gnmr_megatron.training.run_folder import choose_run_folder
from tests.conftest import TINY, options, run_cli
from tests.tiny_llama import assert_same_tensors, save_llama, save_tokenizer, tensors_of

FREE = {key: value for key, value in TINY.items() if not key.startswith("model.")}
LAYOUT = {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}
SHARDED = {
    "name": "sharded",
    "model.dtype": "bf16",
    "parallel.tensor_model_parallel_size": 1,
    "parallel.use_distributed_optimizer": "true",
    "optimizer.lr": 1e-6,
    "optimizer.weight_decay": 0,
}


def verb(*arguments):
    """Exit code, standard output and standard error of a verb, in this process, which has loaded torch."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def done(*arguments):
    """Standard output of a verb that has to succeed."""
    code, out, err = verb(*arguments)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of transformers', the checkpoint made of it, data of its tokenizer, and a run of both."""
    folder = tmp_path_factory.mktemp("convert")
    size = save_tokenizer(folder / "hf")
    save_llama(folder / "hf", vocab_size=size, rope="llama3")
    told = done("convert", "hf-to-megatron", folder / "hf", "--output", folder / "llama", "--json")
    lines = [json.dumps({"text": f"{number} cats sat on the mat. " * 20}) for number in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare = ("prepare-data", folder / "text.jsonl", "--workers", 1)
    done(*prepare, "--tokenizer", json.loads(told)["tokenizer"], "--output", folder / "data")
    done(*prepare, "--vocab-size", 300, "--output", folder / "other")  # trains a tokenizer
    settings = {
        **FREE, **LAYOUT, "data.datasets": f"[{folder / 'data'}]", "runs_dir": folder, "name": "tuned",
        "train.steps": 3,
    }  # fmt: skip
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    worker = [Path(__file__).with_name("convert_worker.py"), folder / "logits.pt"]
    base = ["--config", folder / "llama/config.yaml"]
    arguments = [*base, *options(settings), "--", *base, *options(settings | SHARDED)]
    trained = subprocess.run(
        [sys.executable, *command, *worker, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert trained.returncode == 0, trained.stderr[-4000:]
    return folder


def test_logits_in_a_layout_of_four_are_those_of_transformers(world):
    found = torch.load(world / "logits.pt")
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(world / "hf")(found["tokens"]).logits
    logits = found["logits"][..., : expected.shape[-1]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_weights_that_a_layout_of_four_took_up_return_to_the_bit(world):
    checkpoint = world / "tuned/checkpoints/step_00000000"
    arguments = ("--output", world / "same", "--max-shard-size", "50MB")
    done("convert", "megatron-to-hf", checkpoint, *arguments)
    assert_same_tensors(world / "hf", world / "same")


def test_a_tuned_run_is_exported_with_the_tokenizer_and_settings_it_came_with(world):
    done("convert", "megatron-to-hf", world / "tuned", "--output", world / "tuned-hf", "--json")
    assert CheckpointDescription.read(world / "tuned/checkpoints/step_00000003").step == 3
    before, after = tensors_of(world / "hf"), tensors_of(world / "tuned-hf")
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    theirs, ours = (AutoTokenizer.from_pretrained(world / name) for name in ("hf", "tuned-hf"))
    assert ours.encode("the cat") == theirs.encode("the cat")
    model = LlamaForCausalLM.from_pretrained(world / "tuned-hf")
    assert model.config.max_position_embeddings == 32
    assert model.config.rope_parameters["rope_type"] == "llama3"


def test_the_chat_template_of_the_run_s_own_data_is_exported_with_its_tokens(world, tmp_path):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    messages = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "sat"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 60)
    # the same tokenizer, whose turns end with another token
    shutil.copytree(world / "llama/huggingface", tmp_path / "tokenizer")
    before = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    settings_file = tmp_path / "tokenizer/tokenizer_config.json"
    end = "<|end_of_turn|>"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"eos_token": end}))
    how = ("--format", "chat", "--chat-template", template, "--workers", 1)
    source = ("--tokenizer-from", tmp_path / "tokenizer", "--output", tmp_path / "chats")
    done("prepare-data", tmp_path / "chats.jsonl", *how, *source)
    settings = {
        **FREE, "data.datasets": f"[{tmp_path / 'chats'}]", "runs_dir": tmp_path, "name": "chat",
        "train.steps": 2, "optimizer.warmup_steps": 1, "data.sequence_length": 64, "data.split": "50,50,0",
    }  # fmt: skip
    trained = run_cli("train", "--config", world / "llama/config.yaml", *options(settings))
    assert trained.returncode == 0, trained.stderr
    done("convert", "megatron-to-hf", tmp_path / "chat", "--output", tmp_path / "hf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    written = ours.apply_chat_template(messages, tokenize=False)
    assert written == f"[user] a cat{end}[assistant] sat{end}"
    assert ours.encode(written) == before.encode(written)
    ends = GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id
    assert ends == [LlamaConfig().eos_token_id, ours.convert_tokens_to_ids(end)]  # the base's, too


def test_main_parameters_of_a_sharded_optimizer_start_from_the_weights_too(world):
    done("convert", "megatron-to-hf", world / "sharded", "--output", world / "sharded-hf")
    before, after = tensors_of(world / "hf"), tensors_of(world / "sharded-hf")
    for name, tensor in before.items():  # three steps of at most 1e-6, then rounded
        torch.testing.assert_close(after[name], tensor.bfloat16(), rtol=2**-7, atol=1e-5)


def test_a_run_from_scratch_is_exported_with_its_own_tokenizer(world, tmp_path):
    settings = TINY | {
        "data.datasets": f"[{world / 'other'}]",
        "runs_dir": tmp_path,
        "train.steps": 3,
    }
    trained = run_cli("train", *options(settings))
    assert trained.returncode == 0, trained.stderr
    done("convert", "megatron-to-hf", tmp_path / "run", "--output", tmp_path / "hf")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    ours = load_tokenizer(world / "other/tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("def f(x):\n    return x + 1\n", " led by a space", "\u00e9"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert model.config.vocab_size == ours.vocab_size == len(theirs)
    assert model.config.eos_token_id == theirs.eos_token_id == ours.eod
    assert model.config.max_position_embeddings == TINY["data.sequence_length"]
    moved = (tmp_path / "run/checkpoints/step_00000003").rename(tmp_path / "alone")
    code, _, err = verb("convert", "megatron-to-hf", moved, "--output", tmp_path / "again")
    assert (code, err.count("\n")) == (2, 1)
    assert "give a folder with config.json and the tokenizer's files: --files-from FOLDER" in err
    files = ("--files-from", tmp_path / "hf")
    done("convert", "megatron-to-hf", moved, "--output", tmp_path / "again", *files)
    assert_same_tensors(tmp_path / "hf", tmp_path / "again")


def test_initial_weights_of_another_model_are_refused_before_anything_starts(world, tmp_path):
    base = ("--config", world / "llama/config.yaml", *options(FREE), f"--runs_dir={tmp_path}")
    own, other = (f"--data.datasets=[{world / name}]" for name in ("data", "other"))
    cases = {
        (own, "--model.ffn_hidden_size=128"): "model.ffn_hidden_size: saved 96, now 128",
        (own, "--model.rope_scaling=linear"): "model.rope_scaling: saved llama3, now linear",
        (other, "--data.tokenizer=null"): "  tokenizer: saved ",
        (
            own,
            "--model.vocab_padding_multiple=500",
        ): "model.vocab_padding_multiple): saved 384, now 500",
        (
            own,
            f"--init_from={world / 'hf'}",
        ): "convert it first: gnmr-megatron convert hf-to-megatron",
        (own, f"--init_from={tmp_path}"): "is no complete checkpoint, and no run that has one",
    }
    for changes, message in cases.items():
        code, _, err = verb("train", *base, *changes)
        assert code == 2
        assert err.startswith("gnmr-megatron train: init_from: ")
        assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_converted_checkpoint_is_verified_but_not_resumed(world):
    before = (world / "llama/config.yaml").read_text()
    assert yaml.safe_load(before)["init_from"] == str(world / "llama")
    assert f"{world / 'llama'}: whole" in done("checkpoint", "verify", world / "llama")
    with pytest.raises(
        CheckpointError, match="holds weights only; start a new run from it with --init"
    ):
        choose_run_folder(world, "run", str(world / "llama"))
    assert (world / "llama/config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("hf-to-megatron", "nowhere", "--output", "out"), 2, "nowhere: is no folder"),
        (("megatron-to-hf", "nowhere", "--output", "out"), 1, "nowhere: is no complete checkpoint"),
        (
            ("megatron-to-hf", "nowhere", "--output", "out", "--max-shard-size", "5"),
            2,
            "--max-shard-size: '5' must be a size such as",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, _, err = verb("convert", *arguments)
    assert found == code
    assert message in err
    assert err.count("\n") == 1
