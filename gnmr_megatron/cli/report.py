"""`gnmr-megatron report RUN`: a run as one HTML page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gnmr_megatron.analysis.report import write_report

SUFFIX = ".report.html"


def run(arguments: Sequence[str]) -> int:
    """Write the report and print where it is."""
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron report",
        description="Write one HTML page that shows what runs did: curves, the map of units and steps, what was "
        "recovered and why, spikes, settings, and a verdict in words. The page needs no network and nothing beside it."
        " Run folders are only read, also while their runs go on.",
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folder, such as runs/quickstart"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"file to write; RUN{SUFFIX} in the current folder by default. An earlier report is replaced,"
        " any other file is not.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    output = write_report(options.runs, options.output or _default(options.runs))
    size = output.stat().st_size
    if options.json:
        print(json.dumps({"report": str(output), "bytes": size}))
    else:
        print(f"report     {output} ({size / 1e6:.1f} MB), for any browser")
    return 0


def _default(runs: Sequence[Path]) -> Path:
    """A file in the current folder that is named after the runs."""
    names = [run.resolve().name for run in runs]
    more = [f"{len(names) - 2}-more"] if len(names) > 3 else []
    return Path("-and-".join([*names[: 2 if more else 3], *more]) + SUFFIX)
