"""Small LLaMAs of transformers, saved as their users would."""

import json

import tokenizers
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

ROPE = {
    "plain": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,  # large, so that every part has a say in the logits
    "attn_implementation": "eager",
}


def save_llama(
    folder,
    *,
    vocab_size=300,
    rope="plain",
    tied=False,
    dtype=torch.float32,
    max_shard_size="100KB",
    **changes,
):
    """Save a random model in several files, and return it."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        rope_parameters=dict(ROPE[rope]),
        **{**SIZES, **changes},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms, too, differ from row to row
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def save_tokenizer(folder):
    """Train a small byte-level tokenizer.json with ends of a text and of a turn, and return its size."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    text = ["the cat sat on the mat and the dog sat on the log"] * 4
    special = ["<|end_of_text|>", "<|end_of_turn|>"]
    tokenizer.train_from_iterator(text, vocab_size=281, special_tokens=special, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"})
    )
    return tokenizer.get_vocab_size()


def tensors_of(folder):
    """All tensors of a folder by name, as safetensors' own loader gives them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_tensors(one, other):
    """The same names, and the same bytes in the same types and shapes."""
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.shape) == (second[name].dtype, second[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name
