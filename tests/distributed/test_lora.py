"""Adapters: what they compute and their gradients in every layout, what is frozen, saved and resumed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from gnmr_megatron.cli.main import main
from gnmr_megatron.distributed.checkpoint_index import read_index
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.precision_plan import model_units
from gnmr_megatron.observability.events import EvaluationEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from gnmr_megatron.training.conversion import huggingface_to_megatron
from tests.conftest import TINY, options
from tests.distributed.layout_matrix import compare
from tests.tiny_llama import save_llama, tensors_of

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
EXACT = {"precision.low": "fp32", "precision.recovery": "fp32"}
INT8 = {"precision.low": "frozen_int8", "precision.recovery": "fp32"}
TP2 = {"parallel.tensor_model_parallel_size": 2}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
SP = {"parallel.sequence_parallel": "true"}
RECOMPUTE = {"train.recompute": "full"}
ATTENTION = {"lora.units": "['decoder.layers.[13].self_attention.*']"}
CP2 = {"parallel.context_parallel_size": 2}
VPP2 = {"parallel.virtual_pipeline_model_parallel_size": 2}
SHARDED = {
    "parallel.use_distributed_optimizer": "true", "parallel.overlap_grad_reduce": "true",
    "parallel.overlap_param_gather": "true",
}  # fmt: skip
BF16 = {"model.dtype": "bf16", "precision.recovery": "bf16"}
LAYOUTS = {
    "tp2": TP2,
    "tp2_sp": TP2 | SP,
    "tp2_sp_recompute": TP2 | SP | RECOMPUTE,
    "pp2": PP2,
    "pp2_vpp2": PP2 | VPP2,
    "dp2": {},
    "cp2": CP2,
}
TRAINED = {  # from frozen INT8 weights, recovered to exact ones: layout, reference, tolerances of losses and norms
    "short_tp2_sp": (TP2 | SP, "short", 1e-5, 1e-4),
    "short_pp2_vpp2": (PP2 | VPP2, "short", 1e-5, 1e-4),
    "short_dp2_sharded": (SHARDED, "short", 1e-5, 1e-4),
    "short_cp2_sharded": (CP2 | SHARDED, "short", 1e-5, 1e-4),
    "short_bf16_tp2_sp": (BF16 | TP2 | SP, "short_bf16", 5e-3, 5e-2),
    "short_bf16_dp2_sharded": (BF16 | SHARDED, "short_bf16", 5e-3, 5e-2),
}
DROPOUT = {"lora.dropout": 0.25}
DRAWS = {"tp2": TP2, "tp2_sp": TP2 | SP, "dp2": {}, "cp2": CP2, "pp2": PP2}
HUGGING_FACE = {
    "model.num_attention_heads": 4, "model.num_query_groups": 2, "model.ffn_hidden_size": 96,
}  # fmt: skip
STEPS, SAVED = 6, 3
UNITS = [unit.id for unit in model_units(LlamaConfig(num_layers=4))]
LAST = f"step_{STEPS:08d}"


def launch(world_size, cases, folder):
    file, output = folder / f"cases_{world_size}.json", folder / f"found_{world_size}.pt"
    file.write_text(json.dumps(cases))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    result = subprocess.run(
        [sys.executable, *torchrun, "-m", "tests.distributed.lora_worker", file, output],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def found(dataset, runs):
    """Results of all cases by name: one launch of one process, and one of two."""

    def case(name, does, settings, **more):
        where = {"data.datasets": f"[{dataset}]", "runs_dir": str(runs), "name": name}
        return {"name": name, "does": does, **more, "arguments": options({**TINY, **settings, **where})}  # fmt: skip

    save_llama(runs / "hf", vocab_size=500)
    huggingface_to_megatron(runs / "hf", runs / "converted")
    lora = {"lora.rank": RANK, "lora.alpha": ALPHA, "lora.base": str(runs / "base")}
    longer = {
        "train.steps": STEPS, "checkpoint.interval": SAVED, "optimizer.lr": 1e-2, "gnmr.alpha": 1.1,
        "gnmr.beta": 1.1, "train.eval_interval": STEPS,
    }  # fmt: skip
    full = EXACT | {"init_from": str(runs / "base")}

    def resumed(name, source="trained", **settings):
        copied = [str(runs / source), str(runs / name)]
        settings = lora | INT8 | longer | {"resume": str(runs / name)} | settings
        return case(name, "train", settings, copied_from=copied, without=LAST)

    one = [
        case("base", "train", EXACT | {"train.steps": 3, "optimizer.lr": 3e-3, "train.eval_interval": 3}),
        case("full", "measure", full),
        case("zero", "measure", lora | EXACT),
        case("one", "measure", lora | EXACT, random_b=True),
        case("one_int8", "measure", lora | INT8, random_b=True),
        case("recovered", "measure", lora | INT8, random_b=True, recovered=UNITS),
        case("one_saved", "measure", lora | EXACT | {"precision.low": "saved_int4"}, random_b=True),
        case("part", "measure", lora | EXACT | ATTENTION, random_b=False),
        case("merged", "measure", full, merges="one", scale=SCALE, is_rounded=False),
        case("merged_int8", "measure", full, merges="one", scale=SCALE, is_rounded=True),
        case("trained", "train", lora | INT8 | longer),
        case("huggingface", "train", HUGGING_FACE | lora | EXACT | longer | {"lora.base": str(runs / "converted")}),
        resumed("resumed"),
        case("dropped", "train", lora | INT8 | longer | DROPOUT),
        resumed("dropped_resumed", source="dropped", **DROPOUT),
        case("dropped_recomputed", "train", lora | INT8 | longer | DROPOUT | RECOMPUTE),
        case("short", "train", lora | INT8),
        case("short_bf16", "train", lora | INT8 | BF16),
    ]  # fmt: skip
    two = [
        *(case(name, "measure", lora | EXACT | layout, random_b=True) for name, layout in LAYOUTS.items()),
        case("tp2_sp_int8", "measure", lora | INT8 | TP2 | SP, random_b=True),
        case("pp2_part", "measure", lora | EXACT | ATTENTION | PP2),
        resumed("resumed_tp2_sp", **TP2, **SP),
        *(case(name, "train", lora | INT8 | layout) for name, (layout, *_) in TRAINED.items()),
        *(case(f"drop_{name}", "drop", lora | EXACT | DROPOUT | layout) for name, layout in DRAWS.items()),
        case("dropped_tp2", "measure", lora | EXACT | DROPOUT | TP2, random_b=True),
    ]  # fmt: skip
    return launch(1, one, runs) | launch(2, two, runs)


def events(run, kind):
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def units(found, name="one"):
    return sorted({key[0] for key in found[name]["tensors"]})


def test_a_new_adapter_changes_no_bit_of_the_bases_logits(found):
    torch.testing.assert_close(found["zero"]["logits"], found["full"]["logits"], rtol=0, atol=0)
    assert found["zero"]["loss"] == found["full"]["loss"]
    # and one with another B does
    assert (found["one"]["logits"] - found["full"]["logits"]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        *((name, "merged") for name in ("one", *LAYOUTS)),
        ("one_int8", "merged_int8"),
        ("tp2_sp_int8", "merged_int8"),
    ],
)
def test_gradients_of_a_and_b_follow_from_that_of_the_whole_weight_with_the_adapter_in_it(
    found, ours, reference
):
    """y = (W + s B A) x, so dB = s dW A^T and dA = s B^T dW."""
    tensors, expected = found[ours]["tensors"], found[reference]["tensors"]
    assert found[ours]["loss"] == pytest.approx(found[reference]["loss"], rel=1e-6)
    for unit in units(found):
        a, b = tensors[unit, "a"].double(), tensors[unit, "b"].double()
        gradient = expected[unit, "weight", "grad"].double()
        for matrix, wanted in {
            "a": SCALE * b.t() @ gradient,
            "b": SCALE * gradient @ a.t(),
        }.items():
            difference = (tensors[unit, matrix, "grad"].double() - wanted).norm() / wanted.norm()
            assert difference < 1e-4, (unit, matrix)


@pytest.mark.parametrize("name", ["one", "one_int8", *LAYOUTS])
def test_a_units_norm_is_that_over_its_a_and_b_each_element_once(found, name):
    tensors, norms = found[name]["tensors"], found[name]["norms"]
    assert len(norms) == 16
    for unit, norm in norms.items():
        squares = [tensors[unit, matrix, "grad"].double().square().sum() for matrix in "ab"]
        assert norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
    # nothing else is trained
    assert found[name]["global_norm"] == pytest.approx(math.hypot(*norms.values()), rel=1e-9)
    reference = found["one_int8" if name == "one_int8" else "one"]["norms"]
    assert norms == pytest.approx(reference, rel=1e-5)


def test_with_b_zero_only_b_has_a_gradient(found):
    tensors = found["zero"]["tensors"]
    for unit in units(found):
        assert not tensors[unit, "a", "grad"].any()
        assert tensors[unit, "b", "grad"].any()


def test_the_low_path_sees_weights_rounded_to_int8_and_the_recovery_path_does_not(found):
    low, recovered, exact = (found[name]["logits"] for name in ("one_int8", "recovered", "one"))
    assert (low - exact).abs().max() > 1e-4
    torch.testing.assert_close(recovered, exact, rtol=0, atol=0)
    torch.testing.assert_close(low, found["merged_int8"]["logits"], rtol=0, atol=1e-5)


def test_packing_what_a_keeps_changes_the_gradient_of_a_alone(found):
    packed, exact = found["one_saved"]["tensors"], found["one"]["tensors"]
    torch.testing.assert_close(found["one_saved"]["logits"], found["one"]["logits"], rtol=0, atol=0)
    for unit in units(found):
        assert torch.equal(packed[unit, "b", "grad"], exact[unit, "b", "grad"])
        a, wanted = packed[unit, "a", "grad"], exact[unit, "a", "grad"]
        assert 1e-3 < (a - wanted).norm() / wanted.norm() < 0.2


def test_units_without_an_adapter_are_neither_trained_nor_controlled(found):
    adapted = {
        unit
        for unit in UNITS
        if unit.startswith(("decoder.layers.1.self", "decoder.layers.3.self"))
    }
    for name in ("part", "pp2_part"):
        assert set(found[name]["norms"]) == adapted
        assert {key[0] for key in found[name]["tensors"] if key[-1] == "grad"} == adapted
    assert found["pp2_part"]["norms"] == pytest.approx(found["part"]["norms"], rel=1e-5)


def test_training_leaves_every_bit_of_the_base(found):
    for name in ("trained", "resumed", "resumed_tp2_sp"):
        before, after = found[name]["before"], found[name]["after"]
        assert len(after) == 16
        for unit, weight in after.items():
            assert torch.equal(weight, before[unit])
            assert torch.equal(weight, found["base"]["after"][unit])


def test_training_learns_and_switches(found, runs):
    assert (
        events(runs / "trained", EvaluationEvent)[-1].loss
        < events(runs / "base", EvaluationEvent)[-1].loss
    )
    assert read_risk_matrix(runs / "trained").recovered.any()


def test_a_checkpoint_holds_adapters_only(found, runs):
    index = read_index(runs / "trained/checkpoints" / LAST).state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in index.items() if hasattr(entry, "size")}
    prefix = "decoder.layers.{}."
    per_layer = {
        "self_attention.linear_qkv.lora.a": (RANK, 64),
        "self_attention.linear_qkv.lora.b": (128, RANK),
        "self_attention.linear_proj.lora.a": (RANK, 64),
        "self_attention.linear_proj.lora.b": (64, RANK),
        "mlp.linear_fc1.lora.a": (RANK, 64),
        "mlp.linear_fc1.lora.b": (256, RANK),
        "mlp.linear_fc2.lora.a": (RANK, 128),
        "mlp.linear_fc2.lora.b": (64, RANK),
    }
    names = {
        prefix.format(layer) + name: shape
        for layer in range(4)
        for name, shape in per_layer.items()
    }
    moments = {
        f"optimizer.state.{moment}.{name}": shape
        for name, shape in names.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    assert shapes == names | moments
    others = {key for key in index if key not in shapes}
    assert all(key.startswith("random") for key in others)
    description = json.loads((runs / "trained/checkpoints" / LAST / "checkpoint.json").read_text())
    assert Path(description["state"]["base"]) == (runs / "base/checkpoints/step_00000003").resolve()
    assert description["identity"]["lora.rank"] == RANK


def test_a_resumed_run_goes_on_to_the_bit_and_in_another_layout_alike(found, runs):
    whole, resumed, elsewhere = (runs / n for n in ("trained", "resumed", "resumed_tp2_sp"))
    losses, same, close = (
        [e.loss for e in events(run, StepEvent)] for run in (whole, resumed, elsewhere)
    )
    assert same == losses
    np.testing.assert_allclose(close, losses, rtol=1e-4)
    ours, reference = read_risk_matrix(resumed), read_risk_matrix(whole)
    np.testing.assert_array_equal(ours.norms, reference.norms)
    np.testing.assert_array_equal(ours.selected, reference.selected)


@pytest.mark.parametrize("name", TRAINED)
def test_adapters_train_in_every_layout_as_in_one_process(found, runs, name):
    """Data parallel, distributed optimizer, context parallel, interleaved, in FP32 and BF16."""
    _, reference, loss_tolerance, norm_tolerance = TRAINED[name]
    difference = compare(runs / name, runs / reference)
    assert difference.steps == TINY["train.steps"]
    assert difference.losses <= loss_tolerance
    assert difference.norms <= norm_tolerance
    assert difference.recovered >= 10
    assert difference.same_traces or "bf16" in name
    ours, expected = found[name]["adapters"], found[reference]["adapters"]
    assert ours.keys() == expected.keys()
    assert len(ours) == 32
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    for key, matrix in ours.items():
        assert matrix.dtype == dtype
        error = (matrix.double() - expected[key].double()).norm() / expected[key].double().norm()
        assert error <= norm_tolerance, key


def test_with_dropout_a_resumed_run_goes_on_to_the_bit_and_recompute_drops_the_same(found, runs):
    whole, plain = (read_risk_matrix(runs / name) for name in ("dropped", "trained"))
    assert (whole.norms != plain.norms).any()  # dropout is felt
    for name in ("dropped_resumed", "dropped_recomputed"):
        ours = read_risk_matrix(runs / name)
        np.testing.assert_array_equal(ours.norms, whole.norms)
        np.testing.assert_array_equal(ours.selected, whole.selected)
        losses = [[e.loss for e in events(runs / run, StepEvent)] for run in (name, "dropped")]
        assert losses[0] == losses[1]
        for key, matrix in found["dropped"]["adapters"].items():
            assert torch.equal(found[name]["adapters"][key], matrix)


@pytest.mark.parametrize("operator", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_ranks_that_hold_the_same_input_drop_the_same_of_it_and_others_for_themselves(
    found, operator
):
    def survivors(name):
        """Of each token on either rank; their first such projections."""
        return [
            next(own[unit] for unit in own if unit.endswith(operator)).mul(0.75).round()
            for own in found[f"drop_{name}"]["survivors"]
        ]

    is_row = operator in ("linear_proj", "linear_fc2")
    first, second = survivors("tp2")  # sums over both ranks where inputs are split
    assert torch.equal(first, second)
    if is_row:  # equal draws on two equal inputs would add up to even numbers
        assert (first % 2 == 1).any()
    first, second = survivors("tp2_sp")
    if is_row:
        assert (torch.cat([first, second]) % 2 == 1).any()
    else:  # gathered: the tokens of the two ranks follow each other
        assert torch.equal(first, second)
        assert not torch.equal(*first.chunk(2))
    for name in ("dp2", "cp2", "pp2"):
        assert not torch.equal(*survivors(name)), name


def test_merging_gives_the_weights_of_the_formula_and_unmerging_the_very_bits(found):
    tensors, merged = found["one"]["tensors"], found["one"]["merged_weights"]
    for unit in units(found):
        w, a, b = (tensors[unit, matrix] for matrix in ("weight", "a", "b"))
        expected = (w.double() + SCALE * (b.double() @ a.double())).float()
        torch.testing.assert_close(merged[unit], expected, rtol=1e-6, atol=1e-8)
        assert torch.equal(found["one"]["weights_after"][unit], w)
    torch.testing.assert_close(
        found["one"]["merged_logits"], found["one"]["logits"], rtol=0, atol=1e-5
    )


def our_logits(found):
    """Of a batch of held-out text after training, [sequence, position, vocabulary] without padding."""
    return found["huggingface"]["logits"][..., :500], found["huggingface"]["tokens"]


@pytest.mark.filterwarnings("ignore")  # of peft and transformers
def test_peft_loads_an_exported_adapter_and_computes_the_same_logits(found, runs, tmp_path):
    output = tmp_path / "adapter"
    assert main(["lora", "export", str(runs / "huggingface"), "--output", str(output)]) == 0
    base = LlamaForCausalLM.from_pretrained(runs / "hf")
    ours, tokens = our_logits(found)
    with torch.no_grad():
        without = base(tokens).logits
        model = PeftModel.from_pretrained(base, output)
        theirs = model(tokens).logits
    assert (ours - without).abs().max() > 0.1  # the adapter says something
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    names = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(names) == 4 * 7 * 2
    # A of the fused projection is that of each of its parts
    layer = model.base_model.model.model.layers[1].self_attn
    a = [getattr(layer, name).lora_A["default"].weight for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(a[0], a[1])
    assert torch.equal(a[0], a[2])


def test_merged_weights_convert_to_a_model_that_computes_the_same_logits(found, runs, tmp_path):
    merged, folder = tmp_path / "merged", tmp_path / "folder"
    assert main(["lora", "merge", str(runs / "huggingface"), "--output", str(merged)]) == 0
    assert main(["convert", "megatron-to-hf", str(merged), "--output", str(folder)]) == 0
    ours, tokens = our_logits(found)
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    # what has no adapter is what it was
    before, after = tensors_of(runs / "hf"), tensors_of(folder)
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "_proj" not in name}


def test_adapters_are_refused_where_whole_weights_are_needed(found, runs, tmp_path, capsys):
    output = str(tmp_path / "out")
    assert main(["convert", "megatron-to-hf", str(runs / "trained"), "--output", output]) != 0
    assert "holds adapters only" in capsys.readouterr().err
    assert main(["lora", "merge", str(runs / "base"), "--output", output]) == 2
    assert "holds whole weights and no adapters" in capsys.readouterr().err


def test_a_base_with_other_weights_is_refused(found, runs, tmp_path, capsys):
    where = ["--output", str(tmp_path / "out"), "--base", str(runs / "base")]
    assert main(["lora", "merge", str(runs / "huggingface"), *where]) == 1
    assert "is not the base that the adapters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
