"""The frozen weights under a run's adapters: loaded from their checkpoint whenever the run starts or goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from gnmr_megatron.distributed.engine_checkpoint import load_sharded, load_weights
from gnmr_megatron.distributed.process_groups import gather_from_all
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.lora import add_adapters
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.training.checkpoint import check_checkpoint, sharded_weights


def load_base_and_add_adapters(
    path: Path, chunks: Sequence[GPTModel], config: LoraConfig, *, ids: Collection[str], seed: int
) -> None:
    """Fill the model with frozen weights, and give it adapters; all ranks take part.

    Args:
        path: checkpoint of the weights; that it is of this model was checked before.
        chunks: model chunks of this rank, not wrapped.
        config: of the adapters.
        ids: global names of all projections.
        seed: of the adapters.

    Raises:
        CheckpointError: the checkpoint is damaged; alike on every rank.
        ConfigError: a model chunk of a rank has no adapter; alike on every rank.
    """
    check_checkpoint(path)
    loaded = load_sharded(sharded_weights(chunks), path)
    for chunk, weights in zip(chunks, loaded.values(), strict=True):
        load_weights(chunk, weights)
    add_adapters(chunks, local_linears(chunks, ids), config, seed=seed)
    trains = [any(parameter.requires_grad for parameter in chunk.parameters()) for chunk in chunks]
    idle = [rank for rank, ranks in enumerate(gather_from_all(trains)) if not all(ranks)]
    if idle:
        raise ConfigError(
            f"lora.units: ranks {idle} hold layers without any adapter, so they have nothing to train; add units, or "
            "take fewer pipeline stages"
        )
