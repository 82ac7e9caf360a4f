"""Fills the page of Python names: what the package exports, and the `attach` of each integration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gnmr_megatron
from gnmr_megatron import integrations

MARKER = "<!-- generated: python names -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with a reference to each name, which mkdocstrings then reads from the source."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n\n".join(f"::: {name}" for name in names()))


def names() -> list[str]:
    """Full names of all that is public, without importing what needs torch."""
    exported = [
        f"{gnmr_megatron._HOMES[name]}.{name}"
        for name in gnmr_megatron.__all__
        if name in gnmr_megatron._HOMES
    ]
    return [*exported, *integration_names()]


def integration_names() -> list[str]:
    """`attach` of each module of the integrations that has one."""
    files = sorted(Path(integrations.__path__[0]).glob("*.py"))
    found = [
        path.stem for path in files if re.search(r"^def attach\(", path.read_text(), re.MULTILINE)
    ]
    return [f"{integrations.__name__}.{name}.attach" for name in found]
