"""Hugging Face's LLaMAs become ours and return, in one process; layouts are in tests/end_to_end/test_convert.py."""

import dataclasses
import json
import math
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers import LlamaConfig as TheirConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.engine_checkpoint import load_weights, without_extra_state
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.process_groups import start_process_groups, stop_process_groups
from gnmr_megatron.errors import CheckpointError, ConfigError, DataError
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.huggingface import join, split, weights_by_layer
from gnmr_megatron.models.huggingface_config import huggingface_config, llama_config
from gnmr_megatron.models.llama import build_chunks, transformer_config
from gnmr_megatron.models.rope import inverse_frequencies
from gnmr_megatron.training.checkpoint_files import CheckpointDescription, verify
from gnmr_megatron.training.conversion import huggingface_to_megatron, megatron_to_huggingface
from gnmr_megatron.training.identity import saved_model
from tests.tiny_llama import ROPE, SIZES, assert_same_tensors, save_llama, save_tokenizer

GIB = 1 << 30
MODELS = {
    "grouped, llama3": {"rope": "llama3"},
    "tied, linear": {"rope": "linear", "tied": True},
    "one head a group, dynamic": {"rope": "dynamic", "num_key_value_heads": 4},
    "one group": {"num_key_value_heads": 1, "vocab_size": 256},
}
LENGTH = 48  # longer than max_position_embeddings, so that every scaling shows


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    start_process_groups(ParallelLayout(), seed=1, timeout=timedelta(seconds=30))
    yield
    stop_process_groups()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """For each model: transformers' own, its folder, and the checkpoint made of it."""
    found = {}
    for number, (name, settings) in enumerate(MODELS.items()):
        folder = tmp_path_factory.mktemp("models") / str(number)
        model = save_llama(folder, **settings)
        huggingface_to_megatron(folder, folder / "megatron")
        found[name] = (model, folder, folder / "megatron")
    return found


@pytest.fixture
def broken(converted, tmp_path):
    """A folder to do harm to."""
    save_llama(tmp_path / "broken")
    return tmp_path / "broken"


def our_model(checkpoint):
    """The model of a checkpoint, filled by megatron-core's own loader."""
    identity = CheckpointDescription.read(checkpoint).identity
    config = saved_model(identity)
    engine = transformer_config(
        config, {**ParallelLayout().engine_fields(), **engine_compat.device_fields("cpu")}
    )
    (model,) = build_chunks(
        config,
        engine,
        vocab_size=identity["vocab_size"],
        sequence_length=LENGTH,
        seed=1,
        device=torch.device("cpu"),
    )
    content = without_extra_state(model.sharded_state_dict())
    load_weights(model, dist_checkpointing.load(content, str(checkpoint)))
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(converted, name):
    theirs, _, checkpoint = converted[name]
    vocab_size = theirs.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).repeat(2, 1)
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = our_model(checkpoint)(tokens, positions, None)[..., :vocab_size]
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_returns_to_the_bit(converted, name, tmp_path):
    _, folder, checkpoint = converted[name]
    result = megatron_to_huggingface(checkpoint, tmp_path / "back", max_shard_bytes=60_000)
    assert_same_tensors(folder, tmp_path / "back")
    assert result.parameters == sum(
        tensor.numel()
        for path in folder.glob("*.safetensors")
        for tensor in load_file(path).values()
    )
    before, after = (
        TheirConfig.from_pretrained(path).to_dict() for path in (folder, tmp_path / "back")
    )
    assert before == after
    files = [load_file(path) for path in (tmp_path / "back").glob("*.safetensors")]
    assert len(files) > 6
    for tensors in files:  # a single tensor, such as the embedding, may be larger
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 60_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_kept_and_f16_is_widened(tmp_path, dtype):
    save_llama(tmp_path / "from", dtype=dtype)
    result = huggingface_to_megatron(tmp_path / "from", tmp_path / "megatron")
    back = tmp_path / "back"
    megatron_to_huggingface(tmp_path / "megatron", back, max_shard_bytes=GIB)
    if dtype == torch.bfloat16:
        assert_same_tensors(tmp_path / "from", back)
        assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"
        assert not any("F16" in note for note in result.notes)
    else:
        widened = LlamaForCausalLM.from_pretrained(back).state_dict()
        for name, tensor in (
            LlamaForCausalLM.from_pretrained(tmp_path / "from").state_dict().items()
        ):
            assert widened[name].dtype == torch.float32
            assert torch.equal(widened[name], tensor.float())
        assert any("widened to FP32" in note for note in result.notes)


def test_every_weight_of_the_model_is_in_the_table_and_padding_is_zero(converted):
    _, _, checkpoint = converted["grouped, llama3"]
    model = our_model(checkpoint)
    keys = {
        item.weight.megatron.replace("decoder.layers.", f"decoder.layers.{item.layer}.")
        for group in weights_by_layer(
            saved_model(CheckpointDescription.read(checkpoint).identity), 300
        )
        for item in group
    }
    fused = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    expected = set()
    for name, _ in model.named_parameters():
        for ours, saved in fused.items():
            name = name.replace(ours, saved)
        expected.add(name)
    assert keys == expected
    assert not model.embedding.word_embeddings.weight[300:].any()
    assert verify(checkpoint) == []


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_queries_keys_and_values_are_joined_by_group(groups):
    config = LlamaConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=4,
        num_attention_heads=4,
        num_query_groups=groups,
    )
    qkv = next(
        item
        for group in weights_by_layer(config, 10)
        for item in group
        if item.weight.arranged == "by_query_group"
    )
    # each row tells what it is: 0 to 7 of the queries, 100 and up keys, 200 and up values
    parts = [
        (torch.arange(shape[0]) + 100 * number).float()[:, None].expand(shape).contiguous()
        for number, shape in enumerate(qkv.shapes.values())
    ]
    size, of_group = 2, 4 // groups * 2
    expected = [
        row
        for group in range(groups)
        for row in (
            *range(group * of_group, (group + 1) * of_group),
            *range(100 + group * size, 100 + (group + 1) * size),
            *range(200 + group * size, 200 + (group + 1) * size),
        )
    ]
    whole = join(qkv, parts, config)
    assert whole[:, 0].tolist() == expected
    assert all(map(torch.equal, split(qkv, whole, config).values(), parts))


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("length", [16, 100])
def test_frequencies_are_those_of_transformers(rope, length):
    theirs = TheirConfig(rope_parameters=dict(ROPE[rope]), **SIZES)
    ours = llama_config(
        {**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}, tokenizer_size=None, where=""
    )
    found = inverse_frequencies(ours, length)
    if rope == "plain":
        expected = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[rope](theirs, "cpu", seq_len=length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, r"config\.json: model_type: 'mistral' cannot be represented; only 'llama'"),
        ({"architectures": ["LlamaModel"]}, r"architectures: \['LlamaModel'\]"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu' cannot be represented; only 'silu' can"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        ({"attention_dropout": 0.1}, r"attention_dropout: 0\.1"),
        ({"sliding_window": 4096}, "sliding_window: 4096"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: \{'bits': 4\}"),
        ({"head_dim": 32}, r"head_dim: 32 cannot be represented; only hidden_size / num_attention_heads \(64 / 4\)"),
        ({"num_hidden_layers": None}, "num_hidden_layers: None must be a whole number"),
        ({"rope_theta": 10000.5}, r"rope_theta: 10000\.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, r"rope_scaling\.rope_type: 'yarn' cannot be represented"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 3}}, r"rope_scaling\.beta: is unknown"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"rope_parameters\.rope_type: 'longrope'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: 0\.5"),
        ({"logit_scale": 0.1}, "logit_scale: is unknown and may change the model"),
        ({"num_key_value_heads": 3}, r"gives model\.num_query_groups: 3 must divide"),
        ({"vocab_size": 200}, "vocab_size: 200 is below the 290 entries of the tokenizer"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false' must be true or false"),
        ({"rms_norm_eps": None}, "rms_norm_eps: None must be a number"),
        ({"initializer_range": "0.02"}, r"initializer_range: '0\.02' must be a number"),
        ({"max_position_embeddings": True}, "max_position_embeddings: True must be a whole number"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads: '2' must be a whole number"),
        ({"head_dim": [16]}, r"head_dim: \[16\] must be a whole number"),
        ({"rope_theta": math.inf}, "rope_theta: inf cannot be represented"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_scaling\.rope_type: \['linear'\] cannot"),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_refused_by_its_field(changes, message):
    with pytest.raises(ConfigError, match=message):
        llama_config({**CONFIG, **changes}, tokenizer_size=290, where="config.json")


@pytest.mark.parametrize(
    ("rope", "fields"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_scaling": "linear", "rope_scaling_factor": 2.0}),
        ({"rope_type": "default"}, {"rope_scaling": "none"}),
        (None, {"rope_scaling": "none"}),
    ],
)
def test_older_forms_of_rotary_settings_are_read(rope, fields):
    config = llama_config({**CONFIG, "rope_scaling": rope}, tokenizer_size=None, where="")
    assert fields.items() <= dataclasses.asdict(config).items()
    assert config.rotary_base == 10_000
    content = huggingface_config(config, vocab_size=300, dtype="float32", other_fields={})
    assert llama_config(content, tokenizer_size=None, where="") == config


@pytest.mark.parametrize(
    ("tokenizer", "multiple"), [(300, 128), (260, 128), (200, 384), (None, 128)]
)
def test_all_rows_of_the_embedding_have_a_place_for_any_tokenizer(tokenizer, multiple):
    config = llama_config(CONFIG, tokenizer_size=tokenizer, where="")
    assert config.vocab_padding_multiple == multiple
    assert config.padded_vocab_size(tokenizer or 300) == config.padded_vocab_size(300) == 384


def remove_a_shard(folder):
    (folder / "model-00002-of-00007.safetensors").unlink()


def truncate_a_shard(folder):
    path = folder / "model-00002-of-00007.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_a_row(folder):
    path, name = shard_of(folder, "model.layers.1.self_attn.k_proj.weight")
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name][1:].clone()}, path)


def add_a_tensor(folder):
    path, _ = shard_of(folder, "model.norm.weight")
    save_file({**load_file(path), "model.layers.9.extra": torch.zeros(1)}, path)
    change_index(folder, {"model.layers.9.extra": path.name})


def mix_types(folder):
    path, name = shard_of(folder, "model.norm.weight")
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].bfloat16()}, path)


def leave_the_folder(folder):
    change_index(folder, {"model.norm.weight": "../model.safetensors"})


def lose_a_tensor(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.3.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))


def change_index(folder, changes):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= changes
    index.write_text(json.dumps(content))


def shard_of(folder, name):
    content = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / content["weight_map"][name], name


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (remove_a_shard, r"model-00002-of-00007\.safetensors: is missing"),
        (truncate_a_shard, r"model-00002-of-00007\.safetensors: is no whole safetensors file"),
        (cut_a_row, r"model\.layers\.1\.self_attn\.k_proj\.weight has shape \[31, 64\], config\.json needs \[32, 64\]"),
        (add_a_tensor, r"model\.layers\.9\.extra is no tensor of this model"),
        (mix_types, r"has tensors of several types: .* is F32, model\.norm\.weight is BF16"),
        (leave_the_folder, r"names \.\./model\.safetensors, which is outside of the folder"),
        (lose_a_tensor, r"has no tensor model\.layers\.3\.mlp\.up_proj\.weight"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: is not JSON"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_refused_and_nothing_is_written(broken, harm, message):
    harm(broken)
    output = broken.parent / "out"
    with pytest.raises(DataError, match=message):
        huggingface_to_megatron(broken, output)
    assert [path.name for path in broken.parent.iterdir()] == ["broken"]


def test_a_copy_of_tied_embeddings_must_be_equal(tmp_path):
    save_llama(tmp_path / "tied", tied=True)
    path, _ = shard_of(tmp_path / "tied", "model.embed_tokens.weight")
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    change_index(tmp_path / "tied", {"lm_head.weight": path.name})
    save_file({**tensors, "lm_head.weight": embedding.clone()}, path)
    huggingface_to_megatron(tmp_path / "tied", tmp_path / "equal")
    for head, message in (
        (embedding + 1, r"lm_head\.weight is not model\.embed_tokens\.weight"),
        (embedding.double(), r"lm_head\.weight is of type F64"),
    ):
        save_file({**tensors, "lm_head.weight": head}, path)
        with pytest.raises(DataError, match=message):
            huggingface_to_megatron(tmp_path / "tied", tmp_path / "refused")


def test_what_exists_is_not_overwritten_and_a_failed_conversion_leaves_nothing(
    converted, tmp_path, monkeypatch
):
    _, folder, checkpoint = converted["one group"]
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="is there already; choose another --output"):
        huggingface_to_megatron(folder, tmp_path / "there")
    with pytest.raises(ConfigError, match="is there already"):
        megatron_to_huggingface(checkpoint, tmp_path / "there", max_shard_bytes=GIB)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gnmr_megatron.models.huggingface_files.save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left on device"):
        megatron_to_huggingface(checkpoint, tmp_path / "new", max_shard_bytes=GIB)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    save_llama(tmp_path / "from")
    huggingface_to_megatron(tmp_path / "from", tmp_path / "megatron")
    path = tmp_path / "megatron/__2_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp: is damaged"):
        megatron_to_huggingface(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=GIB)
    assert not (tmp_path / "back").exists()


def test_the_tokenizer_goes_along_and_returns(tmp_path):
    size = save_tokenizer(tmp_path / "from")
    save_llama(tmp_path / "from", vocab_size=size + 3)
    result = huggingface_to_megatron(tmp_path / "from", tmp_path / "megatron")
    assert result.tokenizer == tmp_path / "megatron/huggingface/tokenizer.json"
    assert any(note.startswith("3 rows of the vocabulary") for note in result.notes)
    megatron_to_huggingface(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=GIB)
    assert_same_tensors(tmp_path / "from", tmp_path / "back")
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("from", "back"))
    assert ours.encode("the cat sat") == theirs.encode("the cat sat")
    assert ours.eos_token == "<|end_of_text|>"


CONVERT = """
import re, sys
from pathlib import Path
from gnmr_megatron.training.conversion import huggingface_to_megatron, megatron_to_huggingface
small, big, output = map(Path, sys.argv[1:])
def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
def growth(function, *arguments, **options):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    function(*arguments, **options)
    return memory("VmHWM") - before
for source, target in ((small, output / "small"), (big, output / "big")):  # the first loads libraries
    there = growth(huggingface_to_megatron, source, target / "megatron")
    back = growth(megatron_to_huggingface, target / "megatron", target / "back", max_shard_bytes=1 << 30)
print(there, back, growth(lambda: b"x" * 10_000_000))
"""


def test_memory_is_that_of_a_layer_and_not_of_the_model(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "max_shard_size": "20MB"}
    save_llama(tmp_path / "small", num_hidden_layers=2, **sizes)
    model = save_llama(tmp_path / "big", num_hidden_layers=24, **sizes)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert whole > 24 * layer
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, *(tmp_path / name for name in ("small", "big", "out"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    there, back, control = map(int, done.stdout.split())
    assert 9_000_000 < control < 12_000_000
    for grown in (there, back):  # measured: up to 2 layers
        assert grown < 4 * layer, f"{grown:,} bytes; a layer has {layer:,}"
    assert_same_tensors(tmp_path / "big", tmp_path / "out/big/back")
