"""Which rank contributes which gradient element, so that a sum over all ranks counts each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.models.discovery import unit_parameters


@dataclass(frozen=True)
class OwnedGradient:
    """A piece of the main gradients that this rank speaks for.

    Attributes:
        slot: place in the risk vector: a unit index, or the number of units for the rest of the model.
        gradient: float32 view into the gradient buffer, 1-D, never empty.
    """

    slot: int
    gradient: Tensor


def owned_gradients(
    chunks: Iterable[torch.nn.Module], optimizer: Any, slots: Mapping[int, int], *, rest: int
) -> list[OwnedGradient]:
    """The pieces that this rank contributes.

    Tensor-parallel shards: each rank its own. Tensor-parallel duplicates: rank 0 of the group. Shared
    embeddings: the first copy. Distributed optimizer: the data-parallel rank that holds the reduced shard.
    Plain DDP: rank 0 of the data-parallel group, since all hold the same reduced gradient.

    Args:
        chunks: DDP-wrapped model chunks of this rank.
        optimizer: megatron-core optimizer of the chunks.
        slots: slot of a unit by `id` of its parameters.
        rest: slot of all other parameters.
    """
    is_sharded = engine_compat.uses_distributed_optimizer(optimizer)
    speaks_for_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    owned = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            if not parameter.requires_grad or not engine_compat.is_contributed_here(parameter):
                continue
            gradient = parameter.main_grad.view(-1)  # type: ignore[attr-defined]  # engine's buffer
            if is_sharded:
                part = engine_compat.owned_range(optimizer, parameter)
                gradient = gradient[part] if part is not None else gradient[:0]
            elif not speaks_for_replica:
                continue
            if gradient.numel():
                owned.append(OwnedGradient(slots.get(id(parameter), rest), gradient))
    return owned


def owned_by_unit(
    chunks: Iterable[torch.nn.Module],
    optimizer: Any,
    units: UnitTable,
    linears: Mapping[str, torch.nn.Module],
) -> list[OwnedGradient]:
    """The pieces that this rank contributes, in the slots of the units.

    Args:
        chunks: DDP-wrapped model chunks of this rank.
        optimizer: megatron-core optimizer of the chunks.
        units: of the whole model.
        linears: projections of this rank by global name; those that are no units count as rest.
    """
    slots: dict[int, int] = {
        id(parameter): units.index(name)
        for name, linear in linears.items()
        if name in units.ids
        for parameter in unit_parameters(linear)
    }
    return owned_gradients(chunks, optimizer, slots, rest=len(units))
