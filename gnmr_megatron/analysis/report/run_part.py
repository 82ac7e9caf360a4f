"""All that the page says of one run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.report.blocks import (
    Spans,
    block,
    cells_block,
    recovery_spans,
    series_block,
)
from gnmr_megatron.analysis.report.figures import (
    ControlFigures,
    LossFigures,
    control_figures,
    loss_figures,
)
from gnmr_megatron.analysis.report.grid import Grid, make_grid
from gnmr_megatron.analysis.report.history import RunHistory, read_history
from gnmr_megatron.analysis.report.locks import lock_occupancy
from gnmr_megatron.analysis.report.spikes import Spike, find_spikes
from gnmr_megatron.analysis.report.tables import (
    Places,
    Stretch,
    UnitRow,
    most_recovered,
    places,
    settings,
    stretches,
)
from gnmr_megatron.analysis.report.verdict import Findings, Sentence, verdict
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.schedules import value_at
from gnmr_megatron.control.statistics import IntArray
from gnmr_megatron.observability.console import short_unit
from gnmr_megatron.observability.risk_matrix import MATRIX, UNITS, RiskMatrix


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """Figures, tables and compressed blocks of a run, ready for the template.

    Attributes:
        meta: what the page's scripts need to know of the run, in plain values.
        blocks: name and text of each compressed block.
    """

    name: str
    folder: str
    history: RunHistory
    settings: ControlConfig
    losses: LossFigures | None
    control: ControlFigures
    verdict: tuple[Sentence, ...]
    spikes: tuple[Spike, ...]
    stretches: list[Stretch]
    most_recovered: list[UnitRow]
    places: Places | None
    configuration: list[tuple[str, list[tuple[str, str]]]]
    meta: dict[str, Any]
    blocks: dict[str, str]


def read_run_part(folder: Path, *, max_bytes: float) -> RunPart:
    """Read a run folder, also of a run that still goes on.

    Args:
        folder: run folder.
        max_bytes: of the run's blocks in the page.

    Raises:
        DataError: a file of the run is missing or damaged; the message names it.
    """
    run = RecordedRun(folder)
    history = read_history(run)
    control = run.segments[-1].config
    restarts = [part.first_step for part in run.segments if part.restarts_history]
    locked = lock_occupancy(history.selections, history.series.step, restarts=restarts)
    found = Findings(
        history=history,
        losses=loss_figures(history.series),
        control=control_figures(history, locked, control),
        settings=control,
        spikes=find_spikes(history),
    )
    has_matrix = (folder / UNITS).exists() and (folder / MATRIX).exists()
    matrix = run.matrix if has_matrix else None
    spans = recovery_spans(history, selected=control.mode == "monitor")
    blocks, grid = _blocks(found, locked, spans, matrix, max_bytes=max_bytes)
    return RunPart(
        name=run.name,
        folder=str(folder),
        history=history,
        settings=control,
        losses=found.losses,
        control=found.control,
        verdict=verdict(found),
        spikes=tuple(found.spikes),
        stretches=stretches(history, locked),
        most_recovered=most_recovered(history, spans),
        places=places(run.units, spans) if has_matrix else None,
        configuration=settings(run.config),
        meta=_meta(run.name, found, spans, grid),
        blocks=blocks,
    )


def _blocks(
    found: Findings,
    locked: IntArray,
    spans: Spans,
    matrix: RiskMatrix | None,
    *,
    max_bytes: float,
) -> tuple[dict[str, str], Grid | None]:
    history = found.history
    blocks = {
        "series": series_block(history, locked, found.spikes),
        "cells": cells_block(spans, history.selections, matrix),
    }
    if matrix is None:
        return blocks, None
    left = max_bytes - sum(map(len, blocks.values()))
    steps = history.series.step
    last_step = max(history.start.total_steps, int(steps[-1]) if len(steps) else 0)
    grid = make_grid(matrix, last_step=last_step, max_bytes=left * 3 / 4)  # base64 adds a third
    if grid is not None:
        blocks["grid"] = block(grid.packed())
    return blocks, grid


def _meta(name: str, found: Findings, spans: Spans, grid: Grid | None) -> dict[str, Any]:
    history, control = found.history, found.settings
    steps = history.series.step
    last = int(steps[-1]) if len(steps) else 0
    return {
        "name": name,
        "units": list(history.units),
        "short": [short_unit(unit) for unit in history.units],
        "first": int(steps[0]) if len(steps) else 1,
        "last": last,
        "mode": control.mode,
        "alpha": value_at(control.alpha, last),
        "has_spans": len(spans) > 0,
        "grid": None if grid is None else _grid_meta(grid, alpha=value_at(control.alpha, last)),
    }


def _grid_meta(grid: Grid, *, alpha: float) -> dict[str, Any]:
    return {
        "first": grid.first_step,
        "num_units": grid.codes.shape[0],
        "num_steps": grid.codes.shape[1],
        "resolution": grid.resolution,
        "low": min(grid.low, -0.1),
        "high": max(math.log(alpha), 0.1),  # at the threshold a cell is as bright as can be
    }
