"""`gnmr-megatron summary RUN`: what a run did."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gnmr_megatron.observability.summary import as_dict, render, summarize


def run(arguments: Sequence[str]) -> int:
    """Print the summary of a run folder."""
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron summary",
        description="Tell what a run did: losses, which units were recovered and how often, what control cost."
        " Reads the run folder only; works while the run still writes it.",
    )
    parser.add_argument("run", type=Path, help="run folder, such as runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    summary = summarize(options.run)
    print(json.dumps(as_dict(summary)) if options.json else render(summary))
    return 0
