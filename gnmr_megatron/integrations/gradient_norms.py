"""Gradient norms of units in a model of plain torch, whole or sharded into DTensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from gnmr_megatron.control.statistics import FloatArray


def gradient_norms(
    parameters: Iterable[torch.nn.Parameter],
    weights: Sequence[Tensor],
    *,
    scale: float,
    group: dist.ProcessGroup | None,
) -> tuple[FloatArray, float]:
    """Norm of each unit's gradient, and of all gradients together.

    Where no gradient is a DTensor, each rank holds them whole (as under DDP, once they are reduced), and nothing is
    sent. Else there is one all-reduce of 8 * (units + 1) bytes.

    Args:
        parameters: all of the model.
        weights: one of each unit.
        scale: factor that the gradients carry, as of a loss scaler.
        group: ranks that hold the model together; None for all.

    Returns:
        [units] float64, and the norm over all parameters; equal on every rank of the group.
    """
    slots = {id(weight): index for index, weight in enumerate(weights)}
    pieces, places, shards = [], [], []
    mesh_device = None
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        num_shards = 1
        if isinstance(gradient, DTensor):
            mesh_device = gradient.device_mesh.device_type
            gradient, num_shards = _own_shard(gradient)
        pieces.append(gradient)
        places.append(slots.get(id(parameter), len(weights)))
        shards.append(num_shards)
    squares = torch.zeros(len(weights) + 1, dtype=torch.float64)
    if pieces:
        squares = squares.to(pieces[0].device)
        own = _norms(pieces).double().square()
        if mesh_device is not None:
            # of so many ranks, each element is held by ranks / shards
            copies = dist.get_world_size(group) / torch.tensor(shards, dtype=torch.float64)
            own /= copies.to(own.device)
        squares.index_add_(0, torch.tensor(places).to(own.device), own)
    if mesh_device is not None:
        squares = squares.to(mesh_device)
        dist.all_reduce(squares, group=group)
    values = squares.cpu().numpy()
    return np.sqrt(values[:-1]) / scale, math.sqrt(values.sum()) / scale


def _own_shard(gradient: DTensor) -> tuple[Tensor, int]:
    """What this rank holds of a gradient, and among how many such parts its elements are spread."""
    mesh, placements = gradient.device_mesh, gradient.placements
    if any(placement.is_partial() for placement in placements):
        gradient = gradient.redistribute(
            placements=[Replicate() if each.is_partial() else each for each in placements]
        )
        placements = gradient.placements
    num_shards = math.prod(
        mesh.size(dim) for dim, each in enumerate(placements) if not each.is_replicate()
    )
    return gradient.to_local(), num_shards


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, [tensors]; 16-bit ones are summed in FP32."""
    is_short = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    norms: dict[int, Tensor] = {}
    for dtype in {is_short.get(tensor.dtype) for tensor in tensors}:
        chosen = [i for i, tensor in enumerate(tensors) if is_short.get(tensor.dtype) == dtype]
        found = torch._foreach_norm([tensors[i].detach() for i in chosen], 2, dtype)
        norms.update(zip(chosen, found, strict=True))
    return torch.stack([norms[i].float() for i in range(len(tensors))])
