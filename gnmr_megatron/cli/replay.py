"""`gnmr-megatron replay`: decide on recorded norms again, with the run's settings or with others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from gnmr_megatron.analysis.grid import combinations, replay_grid
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.replay import replay
from gnmr_megatron.analysis.replay_tables import (
    NORMS_WOULD_CHANGE,
    grid_rows,
    grid_table,
    print_replay,
)
from gnmr_megatron.analysis.stretches import changes_settings
from gnmr_megatron.cli.output import results_console
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.training.config_files import changes_parser, parse_changes

DESCRIPTION = """\
Decide on the norms of a recorded run again. With its own settings every decision must come out as recorded;
the first step and units that do not are named, and the exit code is 1. With other settings: what would have
been recovered, beside what was. Settings that are not given stay as the run had them."""

EPILOG = """\
examples:
  gnmr-megatron replay runs/quickstart
  gnmr-megatron replay runs/quickstart --gnmr.alpha 2.5 --gnmr.max_recovered 4
  gnmr-megatron replay runs/quickstart --policy zscore --json
  gnmr-megatron replay runs/quickstart --grid gnmr.alpha=2,2.5,3 gnmr.max_recovered=1,2,4

--json prints identical (whether every decision is as recorded), steps, recovered_unit_steps (in monitor mode
those that would have been), exceedance_rate (candidates with a score above 1, of all unit-steps) and switches
(how often a unit changed its path); with --grid a list of these, each with its settings."""


def run(arguments: Sequence[str]) -> int:
    """Replay once, or a grid."""
    parser = changes_parser("gnmr-megatron replay", description=DESCRIPTION, epilog=EPILOG)
    parser.usage = "%(prog)s RUN [--gnmr.KEY VALUE ...] [--grid gnmr.KEY=VALUE,VALUE ...] [--json]"
    parser.add_argument("run", type=str, metavar="RUN", help="run folder, such as runs/quickstart")
    parser.add_argument("--policy", type=str, metavar="POLICY", help="short for --gnmr.policy")
    parser.add_argument(
        "--grid",
        nargs="+",
        metavar="gnmr.KEY=VALUE,VALUE",
        help="replay with every combination of these values, in parallel",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    arguments = [re.sub(r"^--policy(?==|$)", "--gnmr.policy", item) for item in arguments]
    changes, options = parse_changes(parser, arguments)
    recorded = RecordedRun(Path(options.run))
    if not options.grid:
        return _print_replay(recorded, changes, as_json=options.json)
    values: dict[str, list[Any]] = {key: [value] for key, value in changes.items()}
    for item in options.grid:
        key, texts = _key_and_values(item)
        parsed = [parse_changes(parser, [options.run, f"--{key}={text}"])[0] for text in texts]
        values |= {name: [one[name] for one in parsed] for name in parsed[0]}
    return _print_grid(recorded, list(combinations(values)), as_json=options.json)


def _key_and_values(item: str) -> tuple[str, list[str]]:
    key, sign, values = item.partition("=")
    if not sign or not key.startswith("gnmr."):
        raise ConfigError(
            f"--grid: `{item}` is no gnmr.KEY=VALUE,VALUE; put RUN and other options before --grid"
        )
    return key, re.split(
        r",(?![^{]*})", values
    )  # commas in the braces of a schedule part no values


def _print_grid(recorded: RecordedRun, grid: list[dict[str, Any]], *, as_json: bool) -> int:
    terminal = Console(stderr=True)
    with Progress(console=terminal, disable=not terminal.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{len(grid)} replays", total=len(grid))
        figures = replay_grid(recorded, grid, tell=lambda: progress.advance(task))
    if as_json:
        print(json.dumps(grid_rows(grid, figures)))
    else:
        console = results_console()
        console.print(grid_table(grid, figures))
        console.print(NORMS_WOULD_CHANGE, soft_wrap=True)
    return 0


def _print_replay(recorded: RecordedRun, changes: dict[str, Any], *, as_json: bool) -> int:
    is_changed = changes_settings(recorded, changes)
    result = replay(recorded, changes)
    if as_json:
        print(json.dumps(result.figures.as_dict()))
    else:
        print_replay(results_console(), recorded, result, changes if is_changed else {})
    if is_changed or result.difference is None:
        return 0
    print(f"gnmr-megatron replay: {recorded.folder}: {result.difference}", file=sys.stderr)
    return 1
