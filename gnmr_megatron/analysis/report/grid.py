"""The steps x units map of GNMR, small enough for a page: logarithms in equal steps, two bytes a cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.risk_matrix import RiskMatrix

CodeArray = NDArray[np.int16]

MISSING, ZERO, NOT_FINITE = -32128, -32000, 32000
"""Codes of a step that was not recorded, of a GNMR of 0 and of one that is not finite; they sort as they mean."""

FINEST, COARSEST = 0.005, 0.4  # of a step of the logarithm
OFFSET = 128  # puts the codes around 0 into one high byte, which then compresses to nothing
BLOCK = 16  # units that are worked on at once


@dataclass(frozen=True, kw_only=True)
class Grid:
    """log GNMR of each unit and step.

    Attributes:
        first_step: step of the first column.
        resolution: a code is the natural logarithm of GNMR divided by this, rounded.
        codes: [units, steps] int16.
        low: logarithm of GNMR that only one in a hundred cells lies below; the low end of a colour scale.
    """

    first_step: int
    resolution: float
    codes: CodeArray
    low: float

    def packed(self) -> bytes:
        """All low bytes of the codes, unit by unit, then all high bytes."""
        shifted = (self.codes + OFFSET).astype("<u2").reshape(-1)
        planes = [shifted & 255, shifted >> 8]
        return b"".join(plane.astype(np.uint8).tobytes() for plane in planes)


def make_grid(matrix: RiskMatrix, *, last_step: int, max_bytes: float) -> Grid | None:
    """The finest grid that takes about `max_bytes` when it is compressed; None where no step was recorded.

    Args:
        matrix: of a run.
        last_step: that the run can have reached.
        max_bytes: aim for the compressed size.

    Raises:
        DataError: the steps of the matrix cannot be those of the run.
    """
    if not len(matrix.steps):
        return None
    steps = matrix.steps
    if steps[0] < 1 or (np.diff(steps) <= 0).any() or steps[-1] > last_step:
        raise DataError(
            f"risk_matrix.bin: its steps do not ascend within 1 to {last_step}, the steps of events.jsonl; "
            "one of the two is damaged"
        )
    logs = _logarithms(matrix)
    finite = np.concatenate([block[np.isfinite(block)] for block in logs])
    if not len(finite):
        finite = np.zeros(1, dtype=np.float32)
    low = float(np.quantile(finite, 0.01))
    resolution = _resolution(finite, max_bytes=max_bytes)
    codes = np.full((len(matrix.units), int(steps[-1] - steps[0]) + 1), MISSING, dtype=np.int16)
    columns = steps - steps[0]
    for first, block in zip(range(0, len(matrix.units), BLOCK), logs, strict=True):
        codes[first : first + BLOCK][:, columns] = _encode(block, resolution)
    return Grid(
        first_step=int(steps[0]),
        resolution=resolution,
        codes=codes,
        low=low,
    )


def _logarithms(matrix: RiskMatrix) -> list[NDArray[np.float32]]:
    """Log GNMR as [units, steps], a few units at a time; -inf for 0, and inf for what is not finite."""
    blocks = []
    with np.errstate(divide="ignore"):
        for first in range(0, len(matrix.units), BLOCK):
            values = np.ascontiguousarray(matrix.gnmr[:, first : first + BLOCK].T)
            values[np.isnan(values)] = np.inf
            blocks.append(np.log(values))
    return blocks


def _encode(logs: NDArray[np.float32], resolution: float) -> CodeArray:
    limit = NOT_FINITE - 1
    finite = np.isfinite(logs)
    scaled = np.divide(logs, resolution, out=np.zeros_like(logs), where=finite)
    codes: CodeArray = np.rint(np.clip(scaled, -limit, limit)).astype(np.int16)
    codes[np.isposinf(logs)] = NOT_FINITE
    codes[np.isneginf(logs)] = ZERO
    return codes


def _resolution(finite: NDArray[np.float32], *, max_bytes: float) -> float:
    """The finest step for which the entropy of the codes fits; zlib takes up to an eighth more."""
    for resolution in _resolutions():
        codes = np.clip(np.rint(finite / np.float32(resolution)), -32000, 32000).astype(np.int64)
        share = np.bincount(codes - codes.min()) / len(codes)
        bits = -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum()
        if 1.12 * bits * len(codes) / 8 <= max_bytes:
            return resolution
    return COARSEST


def _resolutions() -> Iterator[float]:
    resolution = FINEST
    while resolution < COARSEST:
        yield resolution
        resolution = round(resolution * 1.2, 4)
