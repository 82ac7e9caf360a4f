"""Adapters on the projections of a model: added, drawn, merged into the weights and taken out again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from gnmr_megatron.models.initialization import stable_seed
from gnmr_megatron.models.lora_adapter import LoraAdapter
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.models.recoverable_linear import RecoverableLinear, RecoverableRowLinear

MARK = ".lora."
"""Part of the names of adapters' parameters, and of no others'."""


def add_adapters(
    chunks: Iterable[torch.nn.Module],
    linears: Mapping[str, torch.nn.Module],
    config: LoraConfig,
    *,
    seed: int,
) -> None:
    """Freeze a model and give adapters to some of its projections.

    A is uniform within 1 / sqrt(in) as in PEFT, drawn from the whole matrix's name and the seed so that every layout
    starts alike; B is zero, so the model computes what its base does.

    Args:
        chunks: model chunks of this rank.
        linears: projections of this rank by global name.
        config: which projections, rank and scale.
        seed: seed of A.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        if getattr(chunk, "pre_process", False):
            embedding: Any = chunk.embedding
            embedding.register_forward_hook(_require_gradient)
    for name, linear in linears.items():
        if isinstance(linear, RecoverableLinear) and config.adapts(name):
            linear.lora = _adapter(name, linear, config, seed=seed)


def _require_gradient(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> None:
    """Let the backward pass through layers without adapters, recomputed layers and pipeline stages."""
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def _adapter(name: str, linear: RecoverableLinear, config: LoraConfig, *, seed: int) -> LoraAdapter:
    is_row = isinstance(linear, RecoverableRowLinear)
    adapter = LoraAdapter(
        linear.weight,
        config,
        split="row" if is_row else "column",
        sequence_parallel=linear.sequence_parallel,
        tp_group=linear.tp_group,
    )
    generator = torch.Generator().manual_seed(stable_seed(seed, f"{name}{MARK}a"))
    whole = (torch.rand(config.rank, linear.input_size, generator=generator) * 2 - 1) / math.sqrt(
        linear.input_size
    )
    if is_row:
        size = parallel_state.get_tensor_model_parallel_world_size()
        whole = whole.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    with torch.no_grad():
        adapter.a.copy_(whole)
    return adapter


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A, computed in FP32 and rounded once to the type of W."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


@contextmanager
def adapters_merged(linears: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the block, adapters are part of the weights, which are multiplied exactly.

    The original weights are kept meanwhile and put back at the end, so they are what they were, bit for bit;
    subtracting B A again would not give them back.
    """
    adapted = [
        linear
        for linear in linears
        if isinstance(linear, RecoverableLinear) and linear.lora is not None
    ]
    originals = [linear.weight.data for linear in adapted]
    try:
        for linear in adapted:
            adapter = linear.lora
            assert adapter is not None
            weight = linear.weight.data.to(adapter.a.device)
            linear.weight.data = merged_weight(
                weight, adapter.a.data, adapter.b.data, adapter.scale
            )
            linear.is_merged = True
        yield
    finally:
        for linear, original in zip(adapted, originals, strict=True):
            linear.weight.data, linear.is_merged = original, False
