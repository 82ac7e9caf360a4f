"""Find the units in the model chunks of a rank, and give them their global names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import parallel_state

from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.models.recoverable_linear import (
    RecoverableColumnLinear,
    RecoverableLinear,
    RecoverableRowLinear,
)

FORWARD_ORDER = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


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


def local_linears(chunks: Iterable[torch.nn.Module]) -> dict[str, RecoverableLinear]:
    """Recoverable linears of this rank by global name."""
    return {
        global_name(chunk, name): module
        for chunk in chunks
        for name, module in unwrap(chunk).named_modules()
        if isinstance(module, RecoverableColumnLinear | RecoverableRowLinear)
    }


def discover_units(
    linears: dict[str, RecoverableLinear], gather: Callable[[list[Unit]], list[list[Unit]]]
) -> UnitTable:
    """The unit table of the whole model, identical on every rank.

    Args:
        linears: recoverable linears of this rank by global name.
        gather: collects the units of all ranks.
    """
    everywhere = gather([_unit(name, module) for name, module in linears.items()])
    # tensor- and data-parallel ranks hold shards of the same units
    return UnitTable({unit for units in everywhere for unit in units})


def _unit(name: str, module: RecoverableLinear) -> Unit:
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    rows, columns = module.weight.shape
    if isinstance(module, RecoverableColumnLinear):
        rows *= tensor_parallel
    else:
        columns *= tensor_parallel
    return Unit(
        layer=int(name.split(".")[2]),
        position=FORWARD_ORDER.index(name.rsplit(".", 1)[-1]),
        id=name,
        shape=(rows, columns),
    )
