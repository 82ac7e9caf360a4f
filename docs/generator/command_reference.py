"""Fills the page of commands from what `gnmr-megatron VERB --help` prints, as it prints it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from typing import Any
from unittest import mock

from gnmr_megatron.cli.main import VERBS, main

MARKER = "<!-- generated: commands -->"
SETTINGS = "All settings of a run:"
WIDTH = "82"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the help of every verb."""
    return markdown.replace(MARKER, render()) if MARKER in markdown else markdown


@functools.cache
def help_of(*verb: str) -> str:
    """What a verb prints for --help; its list of settings, the same for all verbs that have one, is left out."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": WIDTH, "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([*verb, "--help"])
    text = printed.getvalue().replace(f"all cores, {os.cpu_count()}", "all cores")
    head, settings, tail = text.partition(SETTINGS)
    if not settings:
        return text.strip()
    epilog = re.search(r"^\S[^\n]*:\n(?!  --).*", tail, re.DOTALL | re.MULTILINE)
    return f"{head}{SETTINGS} see the page of settings\n\n{epilog[0] if epilog else ''}".strip()


def verbs_of(verb: str) -> list[str]:
    """The verbs of a verb, such as `ls` of `checkpoint`."""
    usage = help_of(verb).partition("\n\n")[0]
    found = re.search(r"(?:\{([\w,-]+)\}|([\w-]+(?: \| [\w-]+)+)) \.\.\.", usage)
    return re.split(r"[, |]+", found[1] or found[2]) if found else []


def render() -> str:
    """A heading for each verb, what it is for, and its help."""
    lines: list[str] = []
    for verb, (_, purpose) in VERBS.items():
        lines += [f"## {verb} {{ #{verb} }}", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
        lines += _block(help_of(verb))
        for inner in verbs_of(verb):
            lines += [f"### {verb} {inner}", "", *_block(help_of(verb, inner))]
    return "\n".join(lines)


def _block(text: str) -> list[str]:
    """A block that wraps instead of scrolling: some lines are as long as their verb likes them."""
    return ['<div class="help" markdown="1">', "", "```text", text, "```", "", "</div>", ""]
