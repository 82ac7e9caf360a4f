"""Decision traces: a run's norms and decisions as data, to verify or to reimplement against."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """One step: its norms in unit order, whether it was taken, and the unit ids selected after it."""

    step: int
    norms: tuple[float, ...]
    updated: bool
    selected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DecisionTrace:
    """Settings, units and steps from the first one on.

    Written as one JSON object; floats carry all their digits, and NaN and inf are strings.
    """

    config: ControlConfig
    units: UnitTable
    steps: tuple[TraceStep, ...]

    def write(self, path: Path) -> None:
        """Write the trace as JSON."""
        record = {
            "config": dataclasses.asdict(self.config),
            "units": [dataclasses.asdict(unit) for unit in self.units],
            "steps": [
                {
                    **dataclasses.asdict(step),
                    "norms": [x if np.isfinite(x) else str(x) for x in step.norms],
                }
                for step in self.steps
            ],
        }
        path.write_text(json.dumps(record, allow_nan=False, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> DecisionTrace:
        """Read a trace; the inverse of `write`."""
        record = json.loads(path.read_text())
        return cls(
            config=ControlConfig.from_plain(record["config"]),
            units=UnitTable(
                Unit(**{**unit, "shape": tuple(unit["shape"])}) for unit in record["units"]
            ),
            steps=tuple(
                TraceStep(
                    step=step["step"],
                    norms=tuple(float(x) for x in step["norms"]),
                    updated=step["updated"],
                    selected=tuple(step["selected"]),
                )
                for step in record["steps"]
            ),
        )

    def verify(self) -> None:
        """Decide every step again.

        Raises:
            ValueError: a decision differs from the recorded one; the message names the first such step.
        """
        controller = Controller(self.config, self.units)
        for recorded in self.steps:
            decision = controller.decide(
                np.array(recorded.norms), step=recorded.step, updated=recorded.updated
            )
            selected = tuple(self.units.ids[index] for index in decision.selected)
            if selected != recorded.selected:
                raise ValueError(
                    f"step {recorded.step}: recorded {list(recorded.selected)}, decided {list(selected)}"
                )
