"""The pages of the documentation as their authors wrote them, and what stands in them."""

import re
from pathlib import Path

from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
TEXTS = {**PAGES, **{name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}}


def blocks(text, *languages):
    """Fenced blocks of these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_blocks(text):
    """The prose alone."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def in_backticks(text):
    """What stands in single backticks in the prose; line ends count as spaces."""
    found = re.findall(r"(?<!`)`([^`]+)`(?!`)", without_blocks(text))
    return [" ".join(item.split()) for item in found]


def commands(text):
    """Lines of all blocks that start the program, with their continuations, without comments."""
    joined = "\n".join(blocks(text, "sh", "text")).replace("\\\n", " ")
    return [
        re.sub(r"\s+#\s.*", "", line)
        for line in joined.splitlines()
        if re.match(r"gnmr-megatron [\w-]+(?: |$)", line)
    ]


def first_column(text, heading):
    """Names in backticks that begin the rows of the table whose first heading this is."""
    table = re.search(
        rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    return re.findall(r"^\| `([^`]+)`", table[1], re.MULTILINE)


def anchors(html: Path):
    """Ids of a built page."""
    return set(re.findall(r'\bid="?([^"\s>]+)', html.read_text()))
