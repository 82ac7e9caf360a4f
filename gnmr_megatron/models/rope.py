"""Rotary frequencies, scaled for sequences longer than those they were made for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnmr_megatron.models.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig, sequence_length: int) -> Tensor:
    """Angle by which each pair of a head's values is turned from one position to the next.

    Args:
        config: architecture.
        sequence_length: longest sequence; `dynamic` scaling depends on it.

    Returns:
        [head_size / 2] float32, in radians.

    Source: RoFormer (arXiv 2104.09864) for the unscaled ones; position interpolation (arXiv 2306.15595) for
        `linear`, NTK-aware scaling for `dynamic`, Llama 3.1 for `llama3`.
    """
    size, factor = config.head_size, config.rope_scaling_factor
    base = float(config.rotary_base)
    if config.rope_scaling == "dynamic":
        longer = max(sequence_length / config.rope_original_positions, 1.0)
        base *= (factor * longer - (factor - 1)) ** (size / (size - 2))
    frequencies = base ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    if config.rope_scaling == "linear":
        return frequencies / factor
    if config.rope_scaling == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: Tensor, config: LlamaConfig) -> Tensor:
    """Long wavelengths are stretched, short ones are kept, and those between are blended."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_positions * frequencies / (2 * math.pi)  # over an original length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)
