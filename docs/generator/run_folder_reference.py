"""Fills the page of the run folder from the dataclasses of its events and the type of its matrix."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from docstring_parser import parse_from_object

from gnmr_megatron.observability.events import EVENTS, SCHEMA_VERSION, Event, SelectedUnit
from gnmr_megatron.observability.risk_matrix import risk_matrix_dtype

EVENT_MARKER = "<!-- generated: events -->"
MATRIX_MARKER = "<!-- generated: risk matrix -->"
UNITS = 1000  # of an example, from which bytes a unit are found


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with all events and the fields of a record."""
    if EVENT_MARKER not in markdown:
        return markdown
    return markdown.replace(EVENT_MARKER, events()).replace(MATRIX_MARKER, risk_matrix())


def events() -> str:
    """A table of fields for each event."""
    lines = [f"`schema_version` is {SCHEMA_VERSION}.", "", *_of(Event, "every event")]
    for name, kind in EVENTS.items():
        lines += _of(kind, f"`{name}`")
    return "\n".join([*lines, *_of(SelectedUnit, "each of a `decision`'s `selected`")])


def risk_matrix() -> str:
    """The fields of a record, and its size."""
    dtype, empty = risk_matrix_dtype(UNITS), risk_matrix_dtype(0).itemsize
    lines = ["| field | type | how many |", "|---|---|---|"]
    for name, (field, *_) in (dtype.fields or {}).items():
        shape = "one a unit" if field.shape else "one"
        lines.append(f"| `{name}` | {field.base.name} | {shape} |")
    per_unit = (dtype.itemsize - empty) // UNITS
    return "\n".join([*lines, "", f"A record of U units takes {empty} + {per_unit} U bytes."])


def _of(kind: type, title: str) -> Iterator[str]:
    described = parse_from_object(kind)
    meanings = {item.arg_name: item.description or "" for item in described.params}
    yield from (f"### {title}", "", inspect.getdoc(kind) or "", "")
    yield from ("| field | type | |", "|---|---|---|")
    inherited = set() if kind is Event else {f.name for f in dataclasses.fields(Event)}
    for field in dataclasses.fields(kind):
        if field.name not in inherited:
            kind_of_value = re.sub(r"\s*\|\s*None", ", or null", str(field.type))
            meaning = " ".join(meanings.get(field.name, "").split())
            yield f"| `{field.name}` | {kind_of_value} | {meaning} |"
    yield ""
