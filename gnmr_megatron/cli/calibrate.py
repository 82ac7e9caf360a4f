"""`gnmr-megatron calibrate`: thresholds for a wanted rate of exceedances, from a recorded run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gnmr_megatron.analysis.calibrate import calibrate
from gnmr_megatron.analysis.calibrate_text import fragment, print_calibration, write_fragment
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.cli.output import results_console


def run(arguments: Sequence[str]) -> int:
    """Print the settings and how they do, or write them."""
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron calibrate",
        description="Find alpha, beta, delta, lock_steps and warmup_steps for a wanted rate of exceedances, from the "
        "norms of a recorded run, best one with gnmr.mode: monitor. Fits on the first 60 %% of the steps and checks "
        "on the others. Assumes that the coming run has norms like this one's.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/monitor")
    parser.add_argument(
        "--target-exceedance",
        type=float,
        required=True,
        metavar="RATE",
        help="unit-steps with a score above 1, of those after the warm-up, such as 0.002",
    )
    parser.add_argument(
        "--max-recovered", type=int, required=True, metavar="N", help="budget to go with it"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.yaml",
        help="write the settings there; `train --config RUN.yaml --config FILE.yaml` takes them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    found = calibrate(
        RecordedRun(options.run),
        target=options.target_exceedance,
        max_recovered=options.max_recovered,
    )
    if options.output is not None:
        write_fragment(found, options.output)
    if options.json:
        print(json.dumps(found.as_dict()))
        return 0
    print_calibration(results_console(), found)
    print(fragment(found) if options.output is None else f"written: {options.output}")
    return 0
