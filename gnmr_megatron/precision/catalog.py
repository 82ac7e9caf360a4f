"""The precision paths there are, and what each asks of a linear; no torch, so that settings are checked first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Granularity = Literal["tensor", "token", "group", "block", "mx"]
PathName = Literal[
    "fp32",
    "bf16",
    "saved_int8",
    "saved_int4",
    "saved_int3",
    "saved_int2",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_hybrid",
    "fp6_e3m2",
    "fp6_e2m3",
    "fp4_e2m1",
    "int8",
    "int4",
    "deepseek_fp8",
    "deepseek_fp6",
    "torch_fp8_tensorwise",
    "torch_fp8_rowwise",
    "te_bf16",
    "te_fp8_tensorwise",
    "te_fp8_blockwise",
    "te_mxfp8",
    "te_nvfp4",
    "frozen_int8",
]
Family = Literal["exact", "saved", "emulated", "deepseek", "torch_fp8", "te", "frozen"]

SCALE_BYTES = {"fp32": 4, "bf16": 2, "e8m0": 1}
ScaleType = Literal["fp32", "bf16", "e8m0"]

SCALE_TYPES: dict[Granularity, ScaleType] = {
    "tensor": "fp32",
    "token": "fp32",
    "group": "bf16",
    "block": "fp32",
    "mx": "e8m0",
}
"""Type of the scales of emulated paths. BF16 where a token has many, so that they stay a small part."""

MX_BLOCK = 32
"""Values that share a scale in the Microscaling formats."""

DEEPSEEK_TILE = 128
"""Side of the tiles and blocks of DeepSeek-V3 (arXiv 2412.19437, section 3.3)."""


@dataclass(frozen=True)
class PathInfo:
    """What is known of a path without running it.

    Attributes:
        name: as in the configuration.
        family: how it is made.
        bits: bits of a value that is kept for the weight gradient.
        scale_block: neighbouring values of a token that share a kept scale, where the path fixes it.
        scale_bytes: bytes of such a scale.
        multiple: what every size of its GEMMs has to be a multiple of.
    """

    name: PathName
    family: Family
    bits: int
    scale_block: int | None = None
    scale_bytes: int = 0
    multiple: int = 1


PATHS: dict[str, PathInfo] = {
    info.name: info
    for info in (
        PathInfo("fp32", "exact", 32),
        PathInfo("bf16", "exact", 16),
        PathInfo("saved_int8", "saved", 8),
        PathInfo("saved_int4", "saved", 4),
        PathInfo("saved_int3", "saved", 3),
        PathInfo("saved_int2", "saved", 2),
        PathInfo("fp8_e4m3", "emulated", 8),
        PathInfo("fp8_e5m2", "emulated", 8),
        PathInfo("fp8_hybrid", "emulated", 8),
        PathInfo("fp6_e3m2", "emulated", 6),
        PathInfo("fp6_e2m3", "emulated", 6),
        PathInfo("fp4_e2m1", "emulated", 4),
        PathInfo("int8", "emulated", 8),
        PathInfo("int4", "emulated", 4),
        PathInfo("deepseek_fp8", "deepseek", 8, DEEPSEEK_TILE, 4),
        PathInfo("deepseek_fp6", "deepseek", 6, DEEPSEEK_TILE, 4),
        PathInfo("torch_fp8_tensorwise", "torch_fp8", 8, multiple=16),
        PathInfo("torch_fp8_rowwise", "torch_fp8", 8, multiple=16),
        PathInfo("te_bf16", "te", 16),
        PathInfo("te_fp8_tensorwise", "te", 8, multiple=16),
        PathInfo("te_fp8_blockwise", "te", 8, 128, 4, multiple=16),
        PathInfo("te_mxfp8", "te", 8, MX_BLOCK, 1, multiple=32),
        PathInfo("te_nvfp4", "te", 4, 16, 1, multiple=32),
        PathInfo("frozen_int8", "frozen", 16),
    )
}


def kept_bytes_per_token(
    path: PathName, width: int, *, granularity: Granularity, group_size: int
) -> float:
    """Bytes that a linear keeps of one token of its input for the weight gradient.

    Scales that all tokens share (one a tensor, one a channel) are left out.

    Args:
        path: a path.
        width: values of a token that one rank holds.
        granularity: of saved and emulated paths.
        group_size: values per scale with `group` and `block`.
    """
    info = PATHS[path]
    values = width * info.bits / 8
    if info.scale_block is not None:
        blocks = -(-width // info.scale_block)
        padded = blocks * info.scale_block if info.family == "deepseek" else width
        return padded * info.bits / 8 + blocks * info.scale_bytes
    if info.family in ("saved", "emulated"):
        return values + _scales_per_token(info, width, granularity, group_size)
    return values


def _scales_per_token(
    info: PathInfo, width: int, granularity: Granularity, group_size: int
) -> float:
    if granularity == "tensor" or (granularity == "token" and info.family == "emulated"):
        return 0  # emulated paths then keep one scale a channel
    per_scale = {"token": width, "mx": MX_BLOCK}.get(granularity, group_size)
    scale_type = SCALE_TYPES[granularity] if info.family == "emulated" else saved_scale(granularity)
    return -(-width // per_scale) * SCALE_BYTES[scale_type]


def saved_scale(granularity: Granularity) -> ScaleType:
    """Type of the scales of saved activations."""
    return "e8m0" if granularity == "mx" else "bf16"


def columns_that_share_bytes(bits: int) -> int:
    """Columns whose codes of so many bits fill whole bytes together."""
    return math.lcm(bits, 8) // bits


def misfits(
    path: PathName,
    *,
    granularity: Granularity,
    group_size: int,
    held: tuple[int, int],
    common_width: int,
    tokens: int,
) -> Iterator[str]:
    """Why a path cannot run a linear, and what would do.

    Args:
        path: a path.
        granularity: of saved and emulated paths.
        group_size: of saved and emulated paths.
        held: [out, in] of the weight that one rank holds.
        common_width: greatest divisor of the widths of all inputs on a rank.
        tokens: rows of a microbatch, over all ranks that share the sequence.
    """
    info, width = PATHS[path], held[1]
    if info.family in ("saved", "emulated"):
        per_scale = {"group": group_size, "block": group_size, "mx": MX_BLOCK}.get(granularity)
        if granularity == "block" and info.family == "saved":
            yield f"{path} knows precision.granularity tensor, token, group and mx, not block"
        elif per_scale is not None and width % per_scale:
            key = "precision.granularity: mx" if granularity == "mx" else "precision.group_size"
            yield (
                f"{key}: {per_scale} does not divide {width}, the width of the input on a rank, as {path} needs; "
                f"possible for all inputs: {_even_divisors(common_width)}; or take another precision.granularity"
            )
        elif path == "fp4_e2m1" and granularity == "tensor":
            yield f"{path} has 8 magnitudes and needs finer scales; set precision.granularity to token, group or mx"
    shared = columns_that_share_bytes(info.bits)
    group = group_size if granularity in ("group", "block") else width
    if info.family in ("saved", "emulated") and (width % shared or group % shared):
        yield (
            f"{path} packs {shared} values together, but {group} share a scale and the input on a rank is {width} "
            "wide; both have to be multiples"
        )
    for what, size in (("output", held[0]), ("input", width), ("microbatch in tokens", tokens)):
        if size % info.multiple:
            yield (
                f"{path} multiplies sizes that are multiples of {info.multiple}, but the {what} on a rank is {size}; "
                "change the model's sizes or parallel.tensor_model_parallel_size, or take another path"
            )


def _even_divisors(width: int) -> str:
    divisors = [size for size in range(2, width + 1, 2) if width % size == 0]
    return ", ".join(str(size) for size in divisors[-8:]) or "none"
