"""`gnmr-megatron diff`: where two recorded runs part, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from gnmr_megatron.analysis.compare import ROUNDING, Comparison, NormDifference, compare
from gnmr_megatron.analysis.recorded_run import RecordedRun

EQUAL, DIFFERENT = 0, 1


def run(arguments: Sequence[str]) -> int:
    """Print where the runs part; the exit code is that of diff(1)."""
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron diff",
        description="Tell the first step in which two recorded runs differ, and why: settings, norms (equal to the "
        "bit, within rounding, or truly different) and decisions. Exits with 0 where the runs are equal, with 1 where "
        "they differ in anything, with 2 where they cannot be compared.",
        allow_abbrev=False,
    )
    parser.add_argument("left", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("right", type=Path, metavar="RUN", help="the other one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    found = compare(RecordedRun(options.left), RecordedRun(options.right))
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        print("\n".join(_lines(found)))
    return EQUAL if found.equal else DIFFERENT


def _lines(found: Comparison) -> Iterator[str]:
    if found.equal:
        yield f"equal: settings, norms and decisions of {found.common_steps:,} steps"
        return
    first = found.first_difference
    where = "no step differs" if first is None else f"first difference in step {first}"
    yield f"{where}; {found.common_steps:,} steps compared"
    if found.steps != (found.common_steps, found.common_steps):
        yield f"length     {found.steps[0]:,} and {found.steps[1]:,} steps"
    if found.settings is None:
        yield "settings   equal"
    else:
        keys = (f"{key} {a} and {b}" for key, (a, b) in found.settings.keys.items())
        yield f"settings   differ from step {found.settings.step} on: {', '.join(keys)}"
    yield f"norms      {_norms(found)}"
    if found.updated is not None:
        yield f"updates    step {found.updated} was taken by one run and skipped by the other"
    if found.recovered is not None:
        yield f"recovered  other units from step {found.recovered} on"
    yield from _decision(found)


def _norms(found: Comparison) -> str:
    if found.first_bit is None:
        return "equal to the bit"
    text = f"equal to the bit before step {found.first_bit.step}"
    if found.first_real is None:
        return f"{text}, then within rounding ({ROUNDING:g}); first {_norm(found.first_bit)}"
    if found.first_real.step > found.first_bit.step:
        text += f", within rounding ({ROUNDING:g}) before step {found.first_real.step}"
    return f"{text}, then different; first {_norm(found.first_real)}"


def _norm(norm: NormDifference) -> str:
    return f"{norm.unit}: {norm.norms[0]:.9g} and {norm.norms[1]:.9g}, relative difference {norm.relative:.2g}"


def _decision(found: Comparison) -> Iterator[str]:
    decision = found.decision
    if decision is None:
        yield "decisions  equal"
        return
    left, right = (", ".join(units) or "none" for units in decision.selected)
    yield f"decisions  differ after step {decision.step}: {left} and {right}"
    yield f"because of {decision.cause}: {decision.unit} {decision.why}"
