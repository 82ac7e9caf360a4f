"""Links from a page to a file of the repository that is no page become its path: the site does not hold it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger

LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)\)")
ROOT = Path(__file__).parents[2]
log = get_plugin_logger("repository_links")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with paths for such links; one that leads nowhere is a warning."""

    def path_of(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, path)
        return f"`{path}`" if path in text else f"{text} (`{path}`)"

    return LINK.sub(path_of, markdown)
