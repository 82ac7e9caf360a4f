"""Precision paths by name: how a linear computes and what it keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnmr_megatron.precision.config import PathName, PrecisionConfig
from gnmr_megatron.precision.formats import INT4, INT8, NumberFormat
from gnmr_megatron.precision.packed import Quantization


@dataclass(frozen=True)
class PrecisionPath:
    """One way to run a linear.

    Attributes:
        name: as in the configuration.
        compute_dtype: type of the operands of all three GEMMs; None takes that of the input.
        saved_input: how the input is kept for the weight gradient; None keeps it as it is.
    """

    name: str
    compute_dtype: torch.dtype | None = None
    saved_input: Quantization | None = None


def precision_path(name: PathName, config: PrecisionConfig) -> PrecisionPath:
    """The path of that name under the given settings."""

    def saved(number_format: NumberFormat) -> PrecisionPath:
        how = Quantization(number_format, config.granularity, config.group_size, config.rounding)
        return PrecisionPath(name, saved_input=how)

    paths = {
        "fp32": lambda: PrecisionPath(name, compute_dtype=torch.float32),
        "bf16": lambda: PrecisionPath(name, compute_dtype=torch.bfloat16),
        "saved_int8": lambda: saved(INT8),
        "saved_int4": lambda: saved(INT4),
    }
    return paths[name]()
