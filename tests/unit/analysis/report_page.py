"""A reader of report pages for tests: the standard library's HTML parser, and the blocks as numbers."""

import base64
import json
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser

import numpy as np


@dataclass
class Page(HTMLParser):
    """Tags with their attributes, the text people read, and the scripts by id."""

    tags: list = field(default_factory=list)
    words: list = field(default_factory=list)
    scripts: dict = field(default_factory=dict)

    def __post_init__(self):
        super().__init__()
        self._open = ""
        self._script = None

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open = tag
        if tag == "script":
            self._script = dict(attributes).get("id", f"script {len(self.scripts)}")
            self.scripts[self._script] = ""

    def handle_endtag(self, tag):
        if tag == self._open:
            self._open = ""

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[self._script] += data
        elif self._open != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def meta(self):
        return json.loads(self.scripts["meta"])

    def block(self, name, run=0):
        return zlib.decompress(base64.b64decode(self.scripts[f"run-{run}-{name}"]))

    def json(self, name, run=0):
        return json.loads(self.block(name, run))

    def codes(self, run=0):
        """[units, steps] codes of the map."""
        grid, offset = self.meta["runs"][run]["grid"], self.meta["codes"]["offset"]
        size = grid["num_units"], grid["num_steps"]
        planes = np.frombuffer(self.block("grid", run), np.uint8).astype(np.int64)
        low, high = planes.reshape(2, *size)
        return (high * 256 + low + 2**15) % 2**16 - 2**15 - offset


def read_page(path):
    page = Page()
    page.feed(path.read_text())
    page.close()
    return page
