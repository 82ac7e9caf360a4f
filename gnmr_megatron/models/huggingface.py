"""Which tensors of a Hugging Face LLaMA are which of Megatron's, and how one is made of the other.

Only names, shapes and how rows are arranged: no values change, so a conversion is exact in both directions. Rotary
positions turn the same pairs of values in both, so nothing is permuted within a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gnmr_megatron.models.config import LlamaConfig

Part = tuple[str, tuple[str, ...]]
"""Name of a Hugging Face tensor, and what its dimensions count."""


@dataclass(frozen=True)
class Weight:
    """One of Megatron's weights and what it is made of.

    Attributes:
        megatron: its key in a checkpoint, the same for all layers, which are stacked along a first dimension.
        parts: Hugging Face's tensors, `{layer}` standing for the layer's index.
        arranged: `as_is`, one tensor; `padded`, one tensor with rows of zeros for the padded vocabulary; `stacked`,
            one after the other; `by_query_group`, for each group its query heads, its key head and its value head.
    """

    megatron: str
    parts: tuple[Part, ...]
    arranged: Literal["as_is", "padded", "stacked", "by_query_group"] = "as_is"

    @property
    def is_stacked(self) -> bool:
        """Whether each layer has one."""
        return self.megatron.startswith("decoder.layers.")


_LAYER = "model.layers.{layer}."
EMBEDDING = Weight(
    "embedding.word_embeddings.weight",
    (("model.embed_tokens.weight", ("vocabulary", "hidden")),),
    "padded",
)
LAYER_WEIGHTS = (
    Weight(
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        ((_LAYER + "input_layernorm.weight", ("hidden",)),),
    ),
    Weight(
        "decoder.layers.self_attention.linear_qkv.weight",
        (
            (_LAYER + "self_attn.q_proj.weight", ("queries", "hidden")),
            (_LAYER + "self_attn.k_proj.weight", ("keys", "hidden")),
            (_LAYER + "self_attn.v_proj.weight", ("keys", "hidden")),
        ),
        "by_query_group",
    ),
    Weight(
        "decoder.layers.self_attention.linear_proj.weight",
        ((_LAYER + "self_attn.o_proj.weight", ("hidden", "queries")),),
    ),
    Weight(
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        ((_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
    ),
    Weight(
        "decoder.layers.mlp.linear_fc1.weight",
        (
            (_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        "stacked",
    ),
    Weight(
        "decoder.layers.mlp.linear_fc2.weight",
        ((_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),),
    ),
)
FINAL_NORM = Weight("decoder.final_layernorm.weight", (("model.norm.weight", ("hidden",)),))
OUTPUT_LAYER = Weight(
    "output_layer.weight", (("lm_head.weight", ("vocabulary", "hidden")),), "padded"
)


@dataclass(frozen=True)
class PlacedWeight:
    """A weight of one layer, or one that is there once.

    Attributes:
        weight: which one.
        layer: index of the layer, or None.
        shapes: shape of each Hugging Face tensor by name, in the order in which they are joined.
        shape: shape of Megatron's, without the dimension of layers.
    """

    weight: Weight
    layer: int | None
    shapes: dict[str, tuple[int, ...]]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Values in it, padding left out."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def weights_by_layer(config: LlamaConfig, vocab_size: int) -> Iterator[list[PlacedWeight]]:
    """All weights of a model in groups: the embedding, each layer, the final norm and the output layer."""
    yield [_place(EMBEDDING, None, config, vocab_size)]
    for layer in range(config.num_layers):
        yield [_place(weight, layer, config, vocab_size) for weight in LAYER_WEIGHTS]
    last = [FINAL_NORM] if config.tie_embeddings else [FINAL_NORM, OUTPUT_LAYER]
    yield [_place(weight, None, config, vocab_size) for weight in last]


def join(placed: PlacedWeight, parts: Sequence[Tensor], config: LlamaConfig) -> Tensor:
    """Megatron's weight out of Hugging Face's tensors.

    Args:
        placed: which one.
        parts: in the order of `placed.shapes`.
        config: architecture.
    """
    match placed.weight.arranged:
        case "as_is":
            return parts[0]
        case "padded":
            return F.pad(parts[0], (0, 0, 0, placed.shape[0] - len(parts[0])))
        case "stacked":
            return torch.cat(list(parts))
        case "by_query_group":
            grouped = [part.unflatten(0, (config.query_groups, -1)) for part in parts]
            return torch.cat(grouped, dim=1).flatten(0, 1)


def split(placed: PlacedWeight, whole: Tensor, config: LlamaConfig) -> dict[str, Tensor]:
    """Hugging Face's tensors by name out of Megatron's weight; contiguous, and each with memory of its own."""
    rows = [shape[0] for shape in placed.shapes.values()]
    match placed.weight.arranged:
        case "as_is":
            parts: Sequence[Tensor] = [whole]
        case "padded":
            parts = [whole[: rows[0]]]
        case "stacked":
            parts = whole.split(rows)
        case "by_query_group":
            groups = config.query_groups
            grouped = whole.unflatten(0, (groups, -1)).split([row // groups for row in rows], dim=1)
            parts = [part.flatten(0, 1) for part in grouped]
    return {
        name: part.clone(memory_format=torch.contiguous_format)
        for name, part in zip(placed.shapes, parts, strict=True)
    }


def _place(weight: Weight, layer: int | None, config: LlamaConfig, vocab_size: int) -> PlacedWeight:
    sizes = {
        "vocabulary": vocab_size,
        "hidden": config.hidden_size,
        "ffn": config.ffn_hidden_size,
        "queries": config.num_attention_heads * config.head_size,
        "keys": config.query_groups * config.head_size,
    }
    shapes = {
        name.format(layer=layer): tuple(sizes[dim] for dim in dims) for name, dims in weight.parts
    }
    first, *rest = next(iter(shapes.values()))
    rows = sum(shape[0] for shape in shapes.values())
    if weight.arranged == "padded":
        rows = config.padded_vocab_size(first)
    return PlacedWeight(weight, layer, shapes, (rows, *rest))
