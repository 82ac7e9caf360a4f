"""The steps x units matrix of a run: one fixed-size record a step, appended.

np.fromfile("risk_matrix.bin", np.dtype(json.load(open("units.json"))["dtype"]))
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.append_file import AppendFile, replace_file

MATRIX = "risk_matrix.bin"
UNITS = "units.json"
RECOVERED, SELECTED = 1, 2
SCHEMA_VERSION = 1


def risk_matrix_dtype(num_units: int) -> np.dtype[Any]:
    """Type of a record, little-endian and without padding.

    step, updated (whether the weights changed), global_norm; for each unit its gradient norm, GNMR and delta-GNMR, and
    flags: bit 0 on the recovery path in this very step, bit 1 selected after it for the next.
    """
    dtype: np.dtype[Any] = np.dtype(_fields(num_units))
    return dtype


def _fields(num_units: int) -> Any:
    """The type as `np.dtype` takes it, in values that JSON knows."""
    fields = {
        "step": "<i8",
        "updated": "u1",
        "global_norm": "<f8",
        "norm": f"({num_units},)<f8",
        "gnmr": f"({num_units},)<f4",
        "delta_gnmr": f"({num_units},)<f4",
        "flags": f"({num_units},)u1",
    }
    return {"names": list(fields), "formats": list(fields.values())}


class RiskMatrixWriter:
    """Appends one record a step; each is with the operating system when `append` returns.

    Important:
        For a folder that already has a matrix use `resume`, which cuts off what a crash left.

    Args:
        folder: run folder.
        units: all units of the model, in the order of the columns.
    """

    def __init__(self, folder: Path, units: UnitTable) -> None:
        self._dtype = risk_matrix_dtype(len(units))
        description = {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": units.fingerprint,
            "dtype": _fields(len(units)),
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
        replace_file(folder / UNITS, (json.dumps(description, indent=1) + "\n").encode())
        self._file = AppendFile(folder / MATRIX)

    @classmethod
    def resume(cls, folder: Path, units: UnitTable, step: int) -> RiskMatrixWriter:
        """Go on after `step`: later records and a half-written one are cut off.

        Raises:
            DataError: the folder's matrix is of other units.
        """
        path = folder / MATRIX
        if path.exists():
            saved = read_risk_matrix(folder, units=units)
            keep = int(np.searchsorted(saved.steps, step, side="right"))
            with path.open("r+b") as file:
                file.truncate(keep * risk_matrix_dtype(len(units)).itemsize)
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
        self._file.append(record.tobytes())

    def close(self) -> None:
        """Bring all records to the disk and close the file."""
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

    def until(self, step: int) -> RiskMatrix:
        """Without the steps after this one."""
        end = int(np.searchsorted(self.steps, step, side="right"))
        arrays = {name: value[:end] for name, value in vars(self).items() if name != "units"}
        return RiskMatrix(units=self.units, **arrays)

    def decisions(self) -> dict[int, list[str]]:
        """Ids of the units selected after each step; under the step before the first, those that it recovered."""
        ids = np.array(self.units, dtype=object)
        found = {
            int(step): ids[row].tolist()
            for step, row in zip(self.steps, self.selected, strict=True)
        }
        if len(self.steps):
            found[int(self.steps[0]) - 1] = ids[self.recovered[0]].tolist()
        return found


class RiskMatrixReader:
    """Reads the matrix of a run folder, also while it is being written; half a record at its end is left out.

    Args:
        folder: run folder.
        units: where given, the matrix must be of these units.

    Attributes:
        units: ids in the order of the columns.

    Raises:
        DataError: there is none, or it is of another version or of other units.
    """

    def __init__(self, folder: Path, *, units: UnitTable | None = None) -> None:
        self._path = folder / MATRIX
        try:
            description = json.loads((folder / UNITS).read_text())
            self._path.stat()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder}: holds no risk matrix ({error}); runs with gnmr.mode: disabled have none"
            ) from error
        schema = description.get("schema_version")
        if schema != SCHEMA_VERSION:
            raise DataError(f"{folder / UNITS}: has schema {schema}, not {SCHEMA_VERSION}")
        try:
            self.units = tuple(unit["id"] for unit in description["units"])
            fingerprint = description["fingerprint"]
        except (KeyError, TypeError) as error:
            raise DataError(f"{folder / UNITS}: is damaged: {error} is missing") from error
        if units is not None and fingerprint != units.fingerprint:
            raise DataError(
                f"{self._path}: {_difference(self.units, units.ids)}; use another run folder"
            )
        self._dtype = risk_matrix_dtype(len(self.units))

    def read(self, *, newest: int | None = None, behind: int = 0) -> RiskMatrix:
        """All records, or the newest so many, after the last `behind` are left out."""
        size = self._dtype.itemsize
        count = max(self._path.stat().st_size // size - behind, 0)
        skipped = 0 if newest is None else max(count - newest, 0)
        records = np.fromfile(self._path, self._dtype, count=count - skipped, offset=skipped * size)
        return RiskMatrix(
            units=self.units,
            steps=records["step"],
            updated=records["updated"].astype(np.bool_),
            global_norm=records["global_norm"],
            norms=records["norm"],
            gnmr=records["gnmr"],
            delta_gnmr=records["delta_gnmr"],
            recovered=(records["flags"] & RECOVERED) > 0,
            selected=(records["flags"] & SELECTED) > 0,
        )


def read_risk_matrix(folder: Path, *, units: UnitTable | None = None) -> RiskMatrix:
    """The whole matrix, as `RiskMatrixReader` reads it."""
    return RiskMatrixReader(folder, units=units).read()


def recorded_decisions(config: ControlConfig) -> dict[int, list[str]] | None:
    """What policy `replay` repeats: the unit ids that the run of `trace` selected after each step.

    Step 0 stands for that run's first recovery set. None for all other policies.

    Raises:
        DataError: the run has no risk matrix that can be read.
    """
    if config.policy != "replay":
        return None
    return read_risk_matrix(Path(config.trace or "")).decisions()


def _difference(saved: tuple[str, ...], given: tuple[str, ...]) -> str:
    """Where two unit tables part, in words."""
    if len(saved) != len(given):
        return f"is of {len(saved)} other units, this model has {len(given)}"
    for column, (ours, theirs) in enumerate(zip(saved, given, strict=True)):
        if ours != theirs:
            return f"is of other units: column {column} is {ours}, in this model {theirs}"
    return "is of units of the same names but other shapes"
