"""Puts the figures into the pages, so that they take the page's colours when a reader changes the theme."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FIGURE = re.compile(r"^!\[([^\]]*)\]\((figures/[\w-]+\.svg)\)$", re.MULTILINE)
ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with each figure that stands on a line of its own as inline SVG."""
    return FIGURE.sub(lambda found: _inline(ROOT / found[2]), markdown)


def _inline(path: Path) -> str:
    lines = (
        line for line in path.read_text().splitlines() if line.strip()
    )  # a blank one ends HTML
    return '<div class="figure" markdown="0">\n{}\n</div>'.format("\n".join(lines))
