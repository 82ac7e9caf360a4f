"""Adapters through the verbs: convert, train, resume, merge, export; and a resume on another base, which is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from gnmr_megatron.cli.main import main
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import TINY, options, run_cli
from tests.tiny_llama import save_llama, tensors_of

STEPS, SAVED = 6, 3
MODEL = {
    "model.num_attention_heads": 4, "model.num_query_groups": 2, "model.ffn_hidden_size": 96,
}  # fmt: skip
LORA = {
    "lora.rank": 4, "precision.low": "frozen_int8", "precision.recovery": "fp32", "optimizer.lr": 1e-2,
    "gnmr.alpha": 1.1, "gnmr.beta": 1.1, "train.steps": STEPS, "checkpoint.interval": SAVED,
}  # fmt: skip


def train(dataset, folder, *arguments, **settings):
    where = {"data.datasets": f"[{dataset}]", "runs_dir": folder / "runs", "name": "tuned"}
    return run_cli("train", *options(TINY | MODEL | LORA | where | settings), *arguments)


def file_sums(run, step):
    checkpoint = run / "checkpoints" / f"step_{step:08d}"
    return json.loads((checkpoint / "checkpoint.json").read_text())["files"]


@pytest.fixture(scope="module")
def folder(dataset, tmp_path_factory):
    """Adapters in runs/tuned; in runs/resumed with their second half trained after a stop and on a base that moved."""
    folder = tmp_path_factory.mktemp("adapters")
    save_llama(folder / "hf", vocab_size=500)
    base = str(folder / "base")
    assert main(["convert", "hf-to-megatron", str(folder / "hf"), "--output", base]) == 0
    result = train(dataset, folder, **{"lora.base": base})
    assert result.returncode == 0, result.stderr
    whole, resumed = folder / "runs/tuned", folder / "runs/resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"step_{STEPS:08d}")
    moved = folder / "moved"
    shutil.move(base, moved)
    result = run_cli("train", "--resume", resumed, "--lora.base", moved)
    assert result.returncode == 0, result.stderr
    merged = str(folder / "merged")
    arguments = ["lora", "merge", str(whole), "--base", str(moved)]
    assert main([*arguments, "--output", merged]) == 0
    return folder


def test_a_resumed_run_ends_in_the_same_bits(folder):
    whole, resumed = folder / "runs/tuned", folder / "runs/resumed"
    ours, reference = read_risk_matrix(resumed), read_risk_matrix(whole)
    np.testing.assert_array_equal(ours.norms, reference.norms)
    np.testing.assert_array_equal(ours.recovered, reference.recovered)
    assert reference.recovered.any()
    sums = file_sums(whole, STEPS)
    assert any(name.endswith(".distcp") for name in sums)  # tensors: adapters and moments
    for name, file in file_sums(resumed, STEPS).items():
        if name.endswith(".distcp"):
            assert file == sums[name]


@pytest.mark.filterwarnings("ignore")  # of peft and transformers
def test_merged_weights_and_peft_with_the_exported_adapter_compute_the_same_logits(folder):
    adapter, merged = folder / "adapter", folder / "merged_hf"
    run = str(folder / "runs/resumed")
    assert main(["lora", "export", run, "--output", str(adapter)]) == 0
    arguments = ["convert", "megatron-to-hf", str(folder / "merged"), "--output", str(merged)]
    assert main(arguments) == 0
    base = LlamaForCausalLM.from_pretrained(folder / "hf")
    tokens = torch.randint(500, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        without = base(tokens).logits
        theirs = PeftModel.from_pretrained(base, adapter)(tokens).logits
        ours = LlamaForCausalLM.from_pretrained(merged)(tokens).logits
    assert (ours - without).abs().max() > 0.1  # the adapter says something
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


def test_merging_leaves_every_byte_of_the_base(folder):
    back = folder / "unmerged_hf"
    arguments = ["convert", "megatron-to-hf", str(folder / "moved"), "--output", str(back)]
    assert main(arguments) == 0
    before, after = tensors_of(folder / "hf"), tensors_of(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def refusal(folder, base):
    """What is said to a resume on another base, which leaves everything as it was."""
    run = folder / "runs/resumed"
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    result = run_cli("train", "--resume", run, "--lora.base", base, "--train.steps", STEPS + 1)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    (line,) = [line for line in result.stderr.splitlines() if "gnmr-megatron" in line]
    return line


def test_a_resume_on_other_frozen_weights_is_refused_and_changes_nothing(folder):
    line = refusal(folder, folder / "merged")
    run = folder / "runs/resumed/checkpoints" / f"step_{STEPS:08d}"
    assert f"{run}: its adapters were trained on other frozen weights" in line
    assert f"than those of {folder / 'merged'}: on those that {folder / 'moved'} had" in line
    assert "--lora.base" in line


def test_a_resume_on_a_base_whose_file_changed_is_refused(folder):
    changed = folder / "changed"
    shutil.copytree(folder / "moved", changed)
    file = max(changed.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert file.name in refusal(folder, changed)
