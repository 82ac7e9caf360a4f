"""What replays come to, as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.replay import Figures, Replay, replay
from gnmr_megatron.analysis.stretches import Settings
from gnmr_megatron.observability.console import short_unit

NORMS_WOULD_CHANGE = (
    "All this is decided on the recorded norms. A run with other settings would have had other norms as soon as it "
    "recovered other units: this is an estimate."
)
WOULD_BE = "The run switched nothing (gnmr.mode: monitor); what is recovered here would have been."


def print_replay(console: Console, run: RecordedRun, result: Replay, changes: Settings) -> None:
    """Print a replay; one with changed settings beside one with those of the run."""
    steps = f"{len(result.steps):,} steps x {len(result.units)} units"
    console.print(f"{run.folder} ({steps})", soft_wrap=True, markup=False)
    for line in _changed_settings(run, changes):
        console.print(line, soft_wrap=True, markup=False)
    columns = {"replayed": result}
    if changes:
        columns = {"recorded": replay(run), "with these settings": result}
    console.print(_replay_table(columns))
    if {segment.config.mode for segment in run.segments} == {"monitor"}:
        console.print(WOULD_BE, soft_wrap=True)
    for line in _verdict(columns, result):
        console.print(line, soft_wrap=True, markup=False)


def _verdict(columns: Mapping[str, Replay], result: Replay) -> Iterator[str]:
    if "recorded" not in columns:
        if result.difference is None:
            yield "Identical: every decision comes out as recorded."
        return
    if columns["recorded"].difference is not None:
        yield (
            "Careful: with the run's own settings the decisions do not come out as recorded, see `gnmr-megatron replay "
            "RUN` without settings."
        )
    if result.difference is None:
        yield "Identical: with these settings every decision is as recorded."
    else:
        yield f"First difference: {result.difference}"
        yield NORMS_WOULD_CHANGE


def _replay_table(columns: Mapping[str, Replay]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    figures = [replay.figures for replay in columns.values()]
    for cells in zip(*(_cells(item) for item in figures), strict=True):
        table.add_row(cells[0][0], *(text for _, text in cells))
    table.add_row("most often", *(_most_often(replay) for replay in columns.values()))
    return table


def _cells(figures: Figures) -> Iterator[tuple[str, str]]:
    share = figures.recovered_unit_steps / figures.unit_steps
    yield "steps", f"{figures.steps:,}"
    yield "recovered unit-steps", f"{figures.recovered_unit_steps:,} ({share:.3%})"
    yield "exceedance rate", f"{figures.exceedance_rate:.3%}"
    yield "switches", f"{figures.switches:,}"
    yield "budget use", f"{figures.budget_use:.1%}"


def _most_often(replay: Replay) -> str:
    counts = replay.in_force.sum(axis=0)
    most = [unit for unit in (-counts).argsort(kind="stable")[:3] if counts[unit]]
    return "\n".join(f"{short_unit(replay.units[unit])} ({counts[unit]:,})" for unit in most) or "-"


def _changed_settings(run: RecordedRun, changes: Settings) -> list[str]:
    lines = []
    for key, value in changes.items():
        configs = [segment.config for segment in run.segments if segment.config.mode != "disabled"]
        before = list(dict.fromkeys(str(getattr(config, key)) for config in configs))
        if before != [str(value)]:
            lines.append(f"gnmr.{key}: {', then '.join(before)} -> {value}")
    return lines


def grid_table(grid: Sequence[Settings], figures: Sequence[Figures]) -> Table:
    """A line for each combination of settings."""
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    for key in grid[0]:
        table.add_column(f"gnmr.{key}", justify="right")
    for name in ("recovered unit-steps", "exceedance rate", "switches", "budget use", "decisions"):
        table.add_column(name, justify="right")
    for changes, item in zip(grid, figures, strict=True):
        values = [text for name, text in _cells(item) if name != "steps"]
        same = "as recorded" if item.identical else "others"
        table.add_row(*(str(value) for value in changes.values()), *values, same)
    return table


def grid_rows(grid: Sequence[Settings], figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """The same in plain values: the keys of a single replay, and `settings`."""
    return [
        {"settings": {f"gnmr.{key}": value for key, value in changes.items()}, **item.as_dict()}
        for changes, item in zip(grid, figures, strict=True)
    ]
