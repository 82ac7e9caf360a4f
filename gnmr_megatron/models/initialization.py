"""Initial weights as a function of global parameter name and seed, so that every layout starts alike."""

from __future__ import annotations

import hashlib
import math

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.discovery import global_name


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the text of its parts, the same in every process and Python version."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def initialize_weights(model: GPTModel, config: LlamaConfig, *, seed: int) -> None:
    """Draw every matrix of this rank from the whole matrix of the model; norms stay 1."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        name = _canonical(global_name(model, name))
        std = config.init_std
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= math.sqrt(2 * config.num_layers)
        with torch.no_grad():
            parameter.copy_(
                _own_part(name, parameter, std=std, seed=seed, tied=config.tie_embeddings)
            )


def _own_part(name: str, parameter: Tensor, *, std: float, seed: int, tied: bool) -> Tensor:
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    is_split = getattr(parameter, "tensor_model_parallel", False)
    dim = parameter.partition_dim if is_split else 0  # type: ignore[attr-defined]  # engine's mark
    shape = list(parameter.shape)
    shape[dim] *= size if is_split else 1
    if tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    whole = torch.randn(shape, generator=generator) * std
    if not is_split:
        return whole
    if name.endswith("linear_fc1.weight"):  # [gate; up], each half sharded by itself
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim)[rank]


def _canonical(name: str) -> str:
    return name.removeprefix("module.")
