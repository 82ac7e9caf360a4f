"""The site builds without a warning, has everything that is generated, and asks nothing of the network."""

import re
import subprocess
import sys
import tomllib

import pytest

from docs.generator.settings_reference import known_keys
from gnmr_megatron.cli.main import VERBS
from gnmr_megatron.observability.events import EVENTS
from tests.conftest import ROOT
from tests.unit.docs.pages import DOCS, PAGES, TEXTS, anchors


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; links, anchors and pages outside of the navigation are checked by mkdocs itself."""
    folder = tmp_path_factory.mktemp("site")
    # not with -q, under which warnings neither show nor count
    command = ["-m", "mkdocs", "build", "--strict", "-f", str(DOCS / "generator/mkdocs.yml")]
    result = subprocess.run(
        [sys.executable, *command, "-d", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_built_and_no_marker_is_left(site):
    for name in PAGES:
        html = (site / name).with_suffix(".html").read_text()
        assert "generated:" not in html, name


def test_every_setting_verb_and_event_has_its_place(site):
    assert anchors(site / "settings.html") >= known_keys()
    assert anchors(site / "command_line.html") >= set(VERBS)
    assert anchors(site / "run_folder.html") >= set(EVENTS)
    exported = (site / "python.html").read_text()
    for name in ("Controller", "ControlConfig", "DecisionTrace", "read_risk_matrix"):
        assert f".{name}" in exported


def test_a_reader_s_browser_is_sent_nowhere_else(site):
    for page in site.rglob("*.html"):
        html = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\"\s>]+)", html)
        for link in re.findall(r"<link\b[^>]*>", html):
            if not re.search(r"rel=\"?(canonical|prev|next)\b", link):
                loaded += re.findall(r"href=\"?([^\"\s>]+)", link)
        assert loaded
        assert [address for address in loaded if re.match(r"(?:https?:)?//", address)] == []
        assert 'class="mermaid"' not in html  # its code would come from a content network
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", style.read_text()), style


def test_links_of_the_repository_to_headings_of_pages_lead_there(site):
    for name in ("README.md", "CONTRIBUTING.md"):
        for page, anchor in re.findall(r"\]\(docs/(\w+)\.md#([\w.-]+)\)", TEXTS[name]):
            assert anchor in anchors(site / f"{page}.html"), (name, page, anchor)


def test_the_figures_stand_in_the_pages_and_take_their_colours(site):
    for page, figures in {"concepts": ["idea"], "architecture": ["rooms", "step"]}.items():
        html = (site / f"{page}.html").read_text()
        for figure in figures:
            assert f'aria-labelledby="{figure}-title {figure}-desc"' in html
        assert "<img" not in html


def test_the_figure_of_the_rooms_is_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers, torchless = contracts[0]["layers"], contracts[1]["source_modules"]
    figure = (DOCS / "figures/rooms.svg").read_text()
    rooms = re.findall(r'<rect class="(\w+)"[^>]*/>\n<text class="head"[^>]*>(\w+)<', figure)
    assert [name for _, name in rooms] == [name for layer in layers for name in layer.split(" | ")]
    coloured = {name for colour, name in rooms if colour == "low"}
    assert coloured == {name.partition(".")[2] for name in torchless} | {"errors"}


def test_the_figure_of_the_step_has_its_calls_in_their_order():
    source = (ROOT / "gnmr_megatron/training/step.py").read_text().partition("def __call__")[2]
    figure = (DOCS / "figures/step.svg").read_text()
    calls = re.findall(r'<text class="code[^>]*>(\w+)<', figure)
    places = [source.index(f".{name}(") for name in calls]
    assert len(calls) == 7
    assert places == sorted(places)
