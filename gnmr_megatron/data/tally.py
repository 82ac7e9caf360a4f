"""Counts of a preparation."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr_megatron.data.corpus import BadRecord
from gnmr_megatron.errors import DataError

SHOWN_BAD_RECORDS = 5


@dataclass
class Tally:
    """What was read, written and left out; see `Manifest`."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    completion_tokens: int = 0
    longest: int = 0
    truncated: int = 0
    too_long: int = 0
    without_completion: int = 0


def too_many_bad(tally: Tally, max_bad: int) -> DataError:
    """The error that names the first bad records."""
    shown = "\n".join(f"  {bad}" for bad in tally.bad[:SHOWN_BAD_RECORDS])
    return DataError(
        f"more than {max_bad} records cannot be read:\n{shown}\n"
        "mend them, or skip up to N with --max-bad N"
    )
