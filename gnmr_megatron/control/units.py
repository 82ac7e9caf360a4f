"""Units: what can be recovered, in one order for all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Unit:
    """One projection operator of the whole model.

    Attributes:
        layer: global 0-based layer index.
        position: order within the layer, in which the forward pass runs the operators.
        id: global module name, `decoder.layers.<layer>.<module path>`, equal in every layout.
        shape: [out_features, in_features] of the whole (unsharded) weight.
    """

    layer: int
    position: int
    id: str
    shape: tuple[int, int]

    @property
    def operator(self) -> str:
        """Last part of the id, such as `linear_fc1`."""
        return self.id.rsplit(".", 1)[-1]


class UnitTable:
    """All units of the model, sorted by layer, then by order in the layer.

    Raises:
        ValueError: an id occurs twice.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units: tuple[Unit, ...] = tuple(sorted(units))
        self.ids: tuple[str, ...] = tuple(unit.id for unit in self.units)
        self._index = {unit_id: index for index, unit_id in enumerate(self.ids)}
        if len(self._index) != len(self.units):
            twice = next(unit_id for unit_id in self.ids if self.ids.count(unit_id) > 1)
            raise ValueError(f"unit {twice} occurs twice")

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __getitem__(self, index: int) -> Unit:
        return self.units[index]

    def index(self, unit_id: str) -> int:
        """Position of a unit in the table; KeyError for an unknown id."""
        return self._index[unit_id]

    @property
    def fingerprint(self) -> str:
        """Hash of ids and shapes in order; equal tables have equal fingerprints."""
        text = "\n".join(f"{unit.id} {unit.shape[0]} {unit.shape[1]}" for unit in self.units)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
