"""A checkpoint as a model of this rank's layout, without optimizer, on one path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from gnmr_megatron.distributed.checkpoint_index import check_pickles
from gnmr_megatron.distributed.engine_checkpoint import load_sharded, load_weights
from gnmr_megatron.distributed.process_groups import gather_from_all, start_process_groups
from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.llama import build_chunks
from gnmr_megatron.models.precision_plan import uses_te
from gnmr_megatron.models.switchboard import Switchboard
from gnmr_megatron.models.switches import path_switches
from gnmr_megatron.training.base_weights import load_base_and_add_adapters
from gnmr_megatron.training.checkpoint import sharded_weights
from gnmr_megatron.training.checkpoint_files import CheckpointDescription, damages
from gnmr_megatron.training.harness.subject import Subject
from gnmr_megatron.training.setup import checked_engine


@dataclass(frozen=True)
class LoadedModel:
    """Model chunks of this rank in evaluation mode, and what puts them on a path."""

    chunks: Sequence[torch.nn.Module]
    switchboard: Switchboard
    device: torch.device


def load_model(subject: Subject) -> LoadedModel:
    """Join the process groups, build the model and fill it; all ranks take part.

    Raises:
        GnmrError: a path cannot run here, or the checkpoint is damaged; alike on every rank.
    """
    config = subject.config
    plans = config.unit_plans()
    engine = checked_engine(config, plans)
    device = start_process_groups(
        config.parallel, seed=config.seed, timeout=timedelta(minutes=config.train.timeout_minutes)
    )
    models = build_chunks(
        config.model,
        engine,
        vocab_size=subject.vocab_size,
        sequence_length=config.data.sequence_length,
        seed=config.seed,
        device=device,
        uses_te=uses_te(plans),
    )
    ids = {plan.unit.id for plan in plans}
    try:
        _fill(models, subject, ids)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    chunks = [Float16Module(engine, model) if engine.bf16 else model for model in models]
    switches = path_switches(config.precision, plans, local_linears(chunks, ids), device)
    for chunk in chunks:
        chunk.eval()
    return LoadedModel(chunks, Switchboard(plans, switches, seed=config.seed), device)


def _fill(models: Sequence[GPTModel], subject: Subject, ids: set[str]) -> None:
    _check(subject.checkpoint)
    if subject.base is not None:
        load_base_and_add_adapters(
            subject.base, models, subject.config.lora, ids=ids, seed=subject.config.seed
        )
    content = sharded_weights(models, only_adapters=subject.base is not None)
    loaded = load_sharded(content, subject.checkpoint)
    for model, weights in zip(models, loaded.values(), strict=True):
        others = {} if subject.base is None else model.state_dict()
        load_weights(model, {**others, **weights})


def _check(path: Path) -> None:
    """Compare all files with their checksums, each rank its share.

    Raises:
        CheckpointError: it is damaged or unsafe; on every rank.
    """
    try:
        description = CheckpointDescription.read(path)
        own = list(damages(path, description, part=dist.get_rank(), parts=dist.get_world_size()))
        if not own:
            check_pickles(path)
    except CheckpointError as error:
        own = [str(error)]
    found = list(dict.fromkeys(line for lines in gather_from_all(own) for line in lines))
    if found:
        raise CheckpointError("\n".join(found))
