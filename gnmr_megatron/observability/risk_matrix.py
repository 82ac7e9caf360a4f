"""The steps x units matrix of a run: one fixed-size record a step, appended.

np.fromfile("risk_matrix.bin", np.dtype([tuple(field) for field in json.load(open("units.json"))["dtype"]]))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.errors import DataError

MATRIX = "risk_matrix.bin"
UNITS = "units.json"
RECOVERED, SELECTED = 1, 2
SCHEMA_VERSION = 1


def record_fields(num_units: int) -> list[tuple[Any, ...]]:
    """Fields of a record, as `np.dtype` takes them.

    step, updated (whether the weights changed), global_norm; for each unit its gradient norm, GNMR and delta-GNMR, and
    flags: bit 0 on the recovery path in this very step, bit 1 selected after it for the next.
    """
    return [
        ("step", "<i8"),
        ("updated", "<u1"),
        ("global_norm", "<f8"),
        ("norm", "<f8", [num_units]),
        ("gnmr", "<f4", [num_units]),
        ("delta_gnmr", "<f4", [num_units]),
        ("flags", "<u1", [num_units]),
    ]


def record_dtype(num_units: int) -> np.dtype[Any]:
    """Type of a record."""
    return np.dtype(
        [(field[0], field[1], *map(tuple, field[2:])) for field in record_fields(num_units)]
    )


class RiskMatrixWriter:
    """Appends one record a step.

    Args:
        folder: run folder.
        units: all units of the model, in the order of the columns.
    """

    def __init__(self, folder: Path, units: UnitTable) -> None:
        self._dtype = record_dtype(len(units))
        description = {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": units.fingerprint,
            "dtype": record_fields(len(units)),
            "units": [
                {
                    "id": unit.id,
                    "layer": unit.layer,
                    "operator": unit.operator,
                    "shape": list(unit.shape),
                }
                for unit in units
            ],
        }
        (folder / UNITS).write_text(json.dumps(description, indent=1) + "\n")
        self._file = (folder / MATRIX).open("ab")

    @classmethod
    def resume(cls, folder: Path, units: UnitTable, step: int) -> RiskMatrixWriter:
        """Go on after `step`: later records and a half-written one are cut off.

        Raises:
            DataError: the folder's matrix is of other units.
        """
        path = folder / MATRIX
        if path.exists():
            saved = read_risk_matrix(folder)
            if saved.units != units.ids:
                raise DataError(
                    f"{path}: is of {len(saved.units)} other units; resume in a new run folder"
                )
            keep = int(np.searchsorted(saved.steps, step, side="right"))
            with path.open("r+b") as file:
                file.truncate(keep * record_dtype(len(units)).itemsize)
        return cls(folder, units)

    def append(
        self,
        *,
        step: int,
        updated: bool,
        global_norm: float,
        norms: NDArray[np.float64],
        gnmr: NDArray[np.float64],
        delta_gnmr: NDArray[np.float64],
        recovered: NDArray[np.int64],
        selected: NDArray[np.int64],
    ) -> None:
        """Write the record of a step; `recovered` and `selected` are unit indices."""
        record = np.zeros((), dtype=self._dtype)
        record["step"], record["updated"], record["global_norm"] = step, updated, global_norm
        record["norm"] = norms
        with np.errstate(over="ignore"):  # a ratio beyond float32 is kept as inf
            record["gnmr"], record["delta_gnmr"] = gnmr, delta_gnmr
        flags = np.zeros(len(norms), dtype=np.uint8)
        flags[recovered] |= RECOVERED
        flags[selected] |= SELECTED
        record["flags"] = flags
        self._file.write(record.tobytes())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class RiskMatrix:
    """The matrix of a run; arrays are [steps] or [steps, units]."""

    units: tuple[str, ...]
    steps: NDArray[np.int64]
    updated: NDArray[np.bool_]
    global_norm: NDArray[np.float64]
    norms: NDArray[np.float64]
    gnmr: NDArray[np.float32]
    delta_gnmr: NDArray[np.float32]
    recovered: NDArray[np.bool_]
    selected: NDArray[np.bool_]


def read_risk_matrix(folder: Path) -> RiskMatrix:
    """Read the matrix of a run folder, also while it is being written.

    Raises:
        DataError: there is none, or it is of another version.
    """
    try:
        description = json.loads((folder / UNITS).read_text())
        size = (folder / MATRIX).stat().st_size
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: holds no risk matrix ({error}); runs with gnmr.mode: disabled have none"
        ) from error
    units: Sequence[dict[str, Any]] = description["units"]
    dtype = record_dtype(len(units))
    if description["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"{folder / UNITS}: has schema {description['schema_version']}, not {SCHEMA_VERSION}"
        )
    records = np.fromfile(folder / MATRIX, dtype, count=size // dtype.itemsize)
    return RiskMatrix(
        units=tuple(unit["id"] for unit in units),
        steps=records["step"],
        updated=records["updated"].astype(np.bool_),
        global_norm=records["global_norm"],
        norms=records["norm"],
        gnmr=records["gnmr"],
        delta_gnmr=records["delta_gnmr"],
        recovered=(records["flags"] & RECOVERED) > 0,
        selected=(records["flags"] & SELECTED) > 0,
    )
