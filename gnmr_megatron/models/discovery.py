"""Find the units in the model chunks of a rank, and give them their global names."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from megatron.core import parallel_state

from gnmr_megatron.control.units import Unit
from gnmr_megatron.models.precision_plan import PROJECTIONS


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP and mixed-precision wrappers."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module  # type: ignore[assignment]  # nn.Module attributes are untyped
    return module


def global_name(model: torch.nn.Module, name: str) -> str:
    """Name of a module or parameter with the global 0-based layer index, the same in every layout.

    Args:
        model: a model chunk, wrapped or not.
        name: local name within the chunk, as `named_modules` or `named_parameters` of any wrapper give it.
    """
    parts = [part for part in name.split(".") if part != "module"]
    if parts[:2] == ["decoder", "layers"]:
        decoder: Any = unwrap(model).decoder
        layer = decoder.layers[int(parts[2])]
        parts[2] = str(
            layer.layer_number - 1
        )  # the engine's layer_number is global and starts at 1
    return ".".join(parts)


def unit_parameters(linear: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters whose gradient is the unit's: those of its adapter, or else its weight."""
    adapter: Any = getattr(linear, "lora", None)
    own: list[Any] = [linear.weight] if adapter is None else list(adapter.parameters())
    return [parameter for parameter in own if parameter.requires_grad]


def local_linears(
    chunks: Iterable[torch.nn.Module], ids: Container[str]
) -> dict[str, torch.nn.Module]:
    """The projections of this rank by global name.

    Args:
        chunks: model chunks of this rank.
        ids: global names of the projections of the whole model.
    """
    named = (
        (global_name(chunk, name), module)
        for chunk in chunks
        for name, module in unwrap(chunk).named_modules()
        if name.startswith("decoder.layers.") and name.count(".") > 2
    )
    return {name: module for name, module in named if name in ids}


def local_units(chunks: Iterable[torch.nn.Module]) -> list[Unit]:
    """The units of this rank's chunks with their whole shapes, whoever built the model.

    Projections are told by their names, as megatron-core gives them; those of experts are none.
    """
    named = (
        (global_name(chunk, name), module)
        for chunk in chunks
        for name, module in unwrap(chunk).named_modules()
        if name.startswith("decoder.layers.")
    )
    units = []
    for name, module in named:
        _, _, layer, *path = name.split(".")
        if len(path) == 2 and PROJECTIONS.get(path[1]) == path[0]:
            position = list(PROJECTIONS).index(path[1])
            units.append(Unit(int(layer), position, name, _whole_shape(module.weight)))
    return units


def _whole_shape(weight: Any) -> tuple[int, int]:
    """Shape over all tensor-parallel ranks."""
    shape = list(weight.shape)
    if getattr(weight, "tensor_model_parallel", False):
        shape[weight.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape[0], shape[1]
