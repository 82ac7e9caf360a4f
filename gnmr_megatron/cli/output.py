"""How verbs print tables."""

from __future__ import annotations

from rich.console import Console


def results_console() -> Console:
    """Standard output: as wide as the terminal, and 140 columns where it is none."""
    return Console(width=None if Console().is_terminal else 140, highlight=False)
