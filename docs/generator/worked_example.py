"""Fills the page of the exact semantics with an example whose numbers the controller makes at every build."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gnmr_megatron import ControlConfig, Controller, Decision, Unit, UnitTable

TABLE_MARKER = "<!-- generated: worked example -->"
SETTINGS_MARKER = "<!-- generated: settings of the worked example -->"
SETTINGS: dict[str, Any] = {
    "alpha": 2.0,
    "beta": 1.5,
    "delta": 2,
    "max_recovered": 1,
    "lock_steps": 2,
    "warmup_steps": 3,
}
UNITS = "ABC"
# norms of A, B, C, and whether the optimizer took the step
STEPS: tuple[tuple[tuple[float, float, float], bool], ...] = (
    ((1.0, 1.0, 1.0), True),
    ((1.0, 1.0, 1.0), True),
    ((9.0, 1.0, 1.0), True),
    ((3.0, 1.0, 1.0), True),
    ((4.0, 4.0, 1.0), True),
    ((math.nan, 1.0, 1.0), False),
    ((1.0, 1.0, 0.0), True),
    ((1.0, 1.0, 0.0), True),
    ((1.0, 1.0, 0.5), True),
    ((8.0, 1.0, 8.0), True),
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the example's settings and numbers."""
    if TABLE_MARKER not in markdown:
        return markdown
    settings = ", ".join(f"`{key}: {value:g}`" for key, value in SETTINGS.items())
    return markdown.replace(SETTINGS_MARKER, settings).replace(TABLE_MARKER, render())


def decisions() -> Iterator[Decision]:
    """What the controller decides."""
    units = UnitTable(Unit(layer, 0, name, (1, 1)) for layer, name in enumerate(UNITS))
    controller = Controller(ControlConfig(**SETTINGS), units)
    for step, (norms, updated) in enumerate(STEPS, start=1):
        yield controller.decide(np.array(norms), step=step, updated=updated)


def render() -> str:
    """A row for each step; the three numbers of a cell are those of A, B and C."""
    lines = [
        "| step | norms | GNMR | delta-GNMR | score | selected | lock after it |",
        "|---|---|---|---|---|---|---|",
    ]
    for decision, (norms, updated) in zip(decisions(), STEPS, strict=True):
        cells = (norms, decision.gnmr, decision.delta_gnmr, decision.score)
        shown = " | ".join(", ".join(map(_number, cell)) for cell in cells)
        selected = ", ".join(UNITS[index] for index in decision.selected) or "none"
        locks = ", ".join(str(lock) for lock in decision.lock)
        step = f"{decision.step}" if updated else f"{decision.step} (skipped)"
        lines.append(f"| {step} | {shown} | {selected} | {locks} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return {math.inf: "inf"}.get(value, f"{value:.3g}")
