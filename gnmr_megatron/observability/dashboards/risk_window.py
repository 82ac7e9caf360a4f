"""The newest rows of the risk matrix, for trackers.

They are read back from the run folder rather than handed over: a tracker needs nothing but events and the folder, all
see the same rows, and after a resume the window reaches back before it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.risk_matrix import RiskMatrix, RiskMatrixReader


class RiskWindow:
    """Rows up to the step that has just been taken; a run without control has none.

    Args:
        folder: run folder, whose matrix has been opened.
        globs: units whose ratios `scalars` gives.
    """

    def __init__(self, folder: Path, globs: Sequence[str]) -> None:
        self._reader: RiskMatrixReader | None = None
        self._columns: list[int] = []
        try:
            self._reader = RiskMatrixReader(folder)
        except DataError:  # gnmr.mode: disabled
            return
        self._columns = [
            column
            for column, unit in enumerate(self._reader.units)
            if any(fnmatch.fnmatchcase(unit, glob) for glob in globs)
        ]

    def up_to(self, step: int, *, num_steps: int) -> RiskMatrix | None:
        """The last rows up to `step`, at most `num_steps`; None where there is none of `step`, as on a full disk."""
        if self._reader is None:
            return None
        last = self._reader.read(newest=1).steps
        if not len(last) or last[0] < step:
            return None
        matrix = self._reader.read(newest=num_steps, behind=int(last[0]) - step)
        return matrix if len(matrix.steps) and matrix.steps[-1] == step else None

    def scalars(self, step: int) -> dict[str, float]:
        """GNMR and delta-GNMR of the chosen units at `step`, by name."""
        row = self.up_to(step, num_steps=1) if self._columns else None
        if row is None:
            return {}
        values: dict[str, float] = {}
        for column in self._columns:
            values[f"gnmr/{row.units[column]}"] = float(row.gnmr[0, column])
            values[f"delta_gnmr/{row.units[column]}"] = float(row.delta_gnmr[0, column])
        return values
