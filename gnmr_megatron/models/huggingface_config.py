"""Hugging Face's config.json of a LLaMA to ours and back; refuses by name what cannot be represented. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from gnmr_megatron.errors import ConfigError
from gnmr_megatron.models.config import LlamaConfig

Json = Mapping[str, Any]

# fields whose only representable value is one of these; absent is right, too
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], None),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
}
_READ = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
}
# what the type of weights is, is read from the weights; the others change no logits
_WITHOUT_EFFECT = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp", "bos_token_id", "eos_token_id",
    "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id", "_name_or_path", "name_or_path",
    "max_sequence_length", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p",
    "num_beams", "num_beam_groups", "num_return_sequences", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "repetition_penalty", "diversity_penalty", "early_stopping", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "output_scores", "return_dict", "return_dict_in_generate",
    "output_attentions", "output_hidden_states", "torchscript", "tf_legacy_loss", "use_bfloat16", "tokenizer_class",
    "prefix", "id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "problem_type",
    "is_decoder", "tie_encoder_decoder", "chunk_size_feed_forward", "_attn_implementation_autoset",
    "_attn_implementation", "attn_implementation",
}  # fmt: skip
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# of fields that may be absent
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "num_key_value_heads": ((int, type(None)), "a whole number"),
    "head_dim": ((int, type(None)), "a whole number"),
    "max_position_embeddings": ((int,), "a whole number"),
    "rms_norm_eps": ((int, float), "a number"),
    "initializer_range": ((int, float), "a number"),
    "tie_word_embeddings": ((bool,), "true or false"),
}
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_FEWEST_PADDED = 128
"""Our default of vocab_padding_multiple: sizes that are one are kept where the tokenizer fills them."""


def llama_config(content: Json, *, tokenizer_size: int | None, where: str) -> LlamaConfig:
    """Our configuration of the model; its dtype is left at the default, the weights tell it.

    Args:
        content: of config.json.
        tokenizer_size: entries of the tokenizer; the padded vocabulary has room for all rows of the embedding, also
            where these are more. None where there is no tokenizer.
        where: the file, for messages.

    Raises:
        ConfigError: with one line for each field that is missing, unknown or not representable.
    """
    problems = [f"{where}: {problem}" for problem in _problems(content, tokenizer_size)]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return LlamaConfig(
            num_layers=content["num_hidden_layers"],
            hidden_size=content["hidden_size"],
            ffn_hidden_size=content["intermediate_size"],
            num_attention_heads=content["num_attention_heads"],
            num_query_groups=content.get("num_key_value_heads"),
            norm_epsilon=content.get("rms_norm_eps", 1e-6),
            init_std=content.get("initializer_range", 0.02),
            tie_embeddings=content.get("tie_word_embeddings", False),
            vocab_padding_multiple=_padding(content["vocab_size"], tokenizer_size),
            **_rope_fields(content),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: gives {error}") from error


def huggingface_config(
    config: LlamaConfig, *, vocab_size: int, dtype: str, other_fields: Json
) -> dict[str, Any]:
    """Content of config.json.

    Args:
        config: ours.
        vocab_size: rows of the embedding.
        dtype: type of the weights, by torch's name.
        other_fields: what the model's configuration does not hold, such as token ids and `max_position_embeddings`;
            fields that it does hold are replaced.
    """
    rope: dict[str, Any] | None = None
    if config.rope_scaling != "none":
        values = {
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_positions,
        }
        if config.rope_scaling == "dynamic":  # counts from max_position_embeddings
            del values["original_max_position_embeddings"]
            other_fields = {
                **other_fields, "max_position_embeddings": config.rope_original_positions
            }  # fmt: skip
        known = _ROPE_KEYS[config.rope_scaling]
        rope = {
            "rope_type": config.rope_scaling,
            **{key: value for key, value in values.items() if key in known},
        }
    derived = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope,
        "torch_dtype": dtype,
    }
    replaced = {"rope_parameters", "dtype", "transformers_version"}
    kept = {key: value for key, value in other_fields.items() if key not in replaced}
    return {**kept, **derived}


def _problems(content: Json, tokenizer_size: int | None) -> Iterator[str]:
    """What is wrong with each field, by its name."""
    yield from _type_problems(content)
    if content.get("model_type") is None:
        yield "model_type: is missing; only 'llama' is converted"
    for key, value in content.items():
        if key in _ONLY:
            if value not in _ONLY[key]:
                yield f"{key}: {value!r} cannot be represented; only {_ONLY[key][0]!r} can"
        elif key not in _READ | _WITHOUT_EFFECT and value is not None:
            yield f"{key}: is unknown and may change the model; remove it if it does not"
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    size = content.get("head_dim")
    if (
        isinstance(size, int)
        and isinstance(hidden, int)
        and isinstance(heads, int)
        and size * heads != hidden
    ):
        yield (
            f"head_dim: {size} cannot be represented; only hidden_size / num_attention_heads "
            f"({hidden} / {heads}) can"
        )
    vocab_size = content.get("vocab_size")
    if tokenizer_size is not None and isinstance(vocab_size, int) and tokenizer_size > vocab_size:
        yield f"vocab_size: {vocab_size} is below the {tokenizer_size} entries of the tokenizer"
    yield from _rope_problems(content)


def _type_problems(content: Json) -> Iterator[str]:
    for key in _NEEDED:
        if not isinstance(content.get(key), int) or isinstance(content.get(key), bool):
            yield f"{key}: {content.get(key)!r} must be a whole number"
    for key, (types, meant) in _TYPES.items():
        value = content.get(key)
        is_truth = isinstance(value, bool)
        if key in content and (not isinstance(value, types) or is_truth != (bool in types)):
            yield f"{key}: {value!r} must be {meant}"


def _rope(content: Json) -> dict[str, Any]:
    """The rotary settings of either form: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    given = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        return {"rope_type": given}
    rope = {"rope_theta": content.get("rope_theta", 10_000), **given}
    kind = rope.pop("type", "default")  # the name that older files use
    return {"rope_type": kind, **rope}


def _rope_problems(content: Json) -> Iterator[str]:
    rope = _rope(content)
    where = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    kind = rope.pop("rope_type")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        yield (
            f"{where}.rope_type: {kind!r} cannot be represented; only {', '.join(_ROPE_KEYS)} can"
        )
        return
    base = rope.pop("rope_theta")
    if not isinstance(base, int | float) or not math.isfinite(base) or base != int(base):
        yield f"rope_theta: {base!r} cannot be represented; only whole numbers can"
    if rope.pop("partial_rotary_factor", None) not in (None, 1):
        yield f"{where}.partial_rotary_factor: cannot be represented; only 1 can"
    for key, value in rope.items():
        if key not in _ROPE_KEYS[kind]:
            yield f"{where}.{key}: is unknown for rope_type {kind!r}"
        elif not isinstance(value, int | float):
            yield f"{where}.{key}: {value!r} must be a number"
    missing = _ROPE_KEYS[kind] - {"original_max_position_embeddings"} - rope.keys()
    for key in sorted(missing):
        yield f"{where}.{key}: is missing, but rope_type {kind!r} needs it"
    positions = content.get("max_position_embeddings")
    if kind == "dynamic" and rope.get("original_max_position_embeddings") not in (None, positions):
        yield f"{where}.original_max_position_embeddings: must be max_position_embeddings, or absent"


def _rope_fields(content: Json) -> dict[str, Any]:
    """Fields of `LlamaConfig`."""
    rope = _rope(content)
    fields: dict[str, Any] = {"rotary_base": int(rope["rope_theta"])}
    kind = rope["rope_type"]
    if kind == "default":
        return fields
    fields |= {"rope_scaling": kind, "rope_scaling_factor": float(rope["factor"])}
    if kind in ("dynamic", "llama3"):
        positions = rope.get("original_max_position_embeddings")
        if positions is None:
            positions = content.get("max_position_embeddings", 2048)
        fields["rope_original_positions"] = int(positions)
    if kind == "llama3":
        fields["rope_low_freq_factor"] = float(rope["low_freq_factor"])
        fields["rope_high_freq_factor"] = float(rope["high_freq_factor"])
    return fields


def _padding(vocab_size: int, tokenizer_size: int | None) -> int:
    """A multiple to which the tokenizer's size is padded so that all rows of the embedding have a place."""
    rows = -(-vocab_size // _FEWEST_PADDED) * _FEWEST_PADDED
    is_filled = (
        tokenizer_size is None or -(-tokenizer_size // _FEWEST_PADDED) * _FEWEST_PADDED == rows
    )
    return _FEWEST_PADDED if is_filled else rows
