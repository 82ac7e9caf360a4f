"""`gnmr-megatron explain`: why a step decided as it did."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gnmr_megatron.analysis.explain import explain, matching
from gnmr_megatron.analysis.explain_text import print_step
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.cli.output import results_console


def run(arguments: Sequence[str]) -> int:
    """Print one decision with all that went into it."""
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron explain",
        description="Tell why a recorded step decided as it did: norms and their history, both ratios, thresholds, "
        "scores, candidates in their order, who was selected or cut by the budget, and locks. The decision after "
        "step N holds in step N + 1.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/quickstart")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="optimizer step")
    parser.add_argument(
        "--unit",
        metavar="GLOB",
        help="only units whose id or short name (L3.fc1) matches, such as 'decoder.layers.3.*' or '*.fc1'",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    explained = explain(RecordedRun(options.run), options.step)
    chosen = None if options.unit is None else matching(explained, options.unit)
    if options.json:
        print(json.dumps(explained.as_dict(explained.units if chosen is None else chosen)))
    else:
        print_step(results_console(), explained, chosen)
    return 0
