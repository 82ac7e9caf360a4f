"""Precision paths by name."""

from __future__ import annotations

import torch

from gnmr_megatron.precision.catalog import (
    DEEPSEEK_TILE,
    MX_BLOCK,
    PATHS,
    SCALE_TYPES,
    PathName,
    saved_scale,
)
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.emulated import EmulatedPath
from gnmr_megatron.precision.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    INT2,
    INT3,
    INT4,
    INT8,
    NumberFormat,
)
from gnmr_megatron.precision.paths import ExactPath, PrecisionPath, SavedPath
from gnmr_megatron.precision.quantization import Quantization
from gnmr_megatron.precision.scaled_matmul import ScaledMatmulPath

FORMATS = {
    number_format.name: number_format
    for number_format in (E4M3, E5M2, E3M2, E2M3, E2M1, INT8, INT4, INT3, INT2)
}
_EXACT = {"fp32": torch.float32, "bf16": torch.bfloat16}
# E3M2 for weights, activations and gradients, as in MXFP6 training (arXiv 2310.10537)
_DEEPSEEK = {"deepseek_fp8": E4M3, "deepseek_fp6": E3M2}


def precision_path(name: PathName, config: PrecisionConfig) -> PrecisionPath:
    """The path of that name under the given settings.

    Raises:
        ValueError: the path is one of Transformer Engine's modules, which run it themselves, or one of frozen weights,
            which each linear has of its own.
    """
    family = PATHS[name].family
    if family == "exact":
        return ExactPath(name, _EXACT[name])
    if family == "saved":
        return SavedPath(name, saved=_saved(FORMATS[name.removeprefix("saved_")], config))
    if family == "emulated":
        return _emulated(name, config)
    if family == "deepseek":
        return _tiled(name, _DEEPSEEK[name], config)
    if family == "torch_fp8":
        return ScaledMatmulPath(name, is_rowwise=name == "torch_fp8_rowwise")
    raise ValueError(f"{name} belongs to a module")


def _saved(number_format: NumberFormat, config: PrecisionConfig) -> Quantization:
    rows, columns = _activation_block(config)
    return Quantization(
        number_format, rows, columns, saved_scale(config.granularity), config.rounding
    )


def _activation_block(config: PrecisionConfig) -> tuple[int | None, int | None]:
    if config.granularity == "tensor":
        return None, None
    columns = {"token": None, "mx": MX_BLOCK}.get(config.granularity, config.group_size)
    return 1, columns


def _emulated(name: PathName, config: PrecisionConfig) -> EmulatedPath:
    forward = E4M3 if name == "fp8_hybrid" else FORMATS[name]
    gradient = E5M2 if name == "fp8_hybrid" else forward
    scale = SCALE_TYPES[config.granularity]
    rows, columns = _activation_block(config)
    activation = Quantization(forward, rows, columns, scale, config.rounding)
    side = config.group_size
    is_block = config.granularity == "block"
    weight = Quantization(forward, side, side, scale, config.rounding) if is_block else activation
    return EmulatedPath(
        name, activation, weight, Quantization(gradient, rows, columns, scale, config.rounding)
    )


def _tiled(name: PathName, number_format: NumberFormat, config: PrecisionConfig) -> EmulatedPath:
    tile = Quantization(number_format, 1, DEEPSEEK_TILE, "fp32", config.rounding)
    block = Quantization(number_format, DEEPSEEK_TILE, DEEPSEEK_TILE, "fp32", config.rounding)
    return EmulatedPath(name, activation=tile, weight=block, gradient=tile)
