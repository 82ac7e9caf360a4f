"""What the documentation says of names, files and settings is so."""

import ast
import contextlib
import io
import re
from typing import get_args, get_type_hints

import numpy as np
import pytest
import yaml

from gnmr_megatron.control.config import ControlConfig, PolicyName
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import StartEvent, StepEvent
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter
from gnmr_megatron.observability.summary import FILES
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.fault_settings import KINDS
from tests.conftest import ROOT
from tests.unit.docs.pages import DOCS, PAGES, TEXTS, blocks, first_column, in_backticks

FOLDERS = ("gnmr_megatron", "configs", "tests", "tools", "launch", "docker", "docs", "examples")
PYTHON = [(name, text) for name, page in PAGES.items() for text in blocks(page, "python")]
YAML = [(name, text) for name, page in TEXTS.items() for text in blocks(page, "yaml")]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder with the repository's tests and a small run, written by what writes runs."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    folder = tmp_path / "runs/quickstart"
    folder.mkdir(parents=True)
    units = UnitTable(
        Unit(layer, 0, f"decoder.layers.{layer}.mlp.linear_fc1", (8, 4)) for layer in range(3)
    )
    controller = Controller(ControlConfig(warmup_steps=0, delta=1), units)
    log, matrix = EventLog(folder), RiskMatrixWriter(folder, units)
    log.append(
        StartEvent(
            step=1, run="quickstart", resumed_from=None, world_size=1, layout={}, num_units=3, max_recovered=1,
            total_steps=2, policy="gnmr", mode="active", environment={},
        )
    )  # fmt: skip
    for step in (1, 2):
        norms = np.array([1.0, 1.0, 1.0 * step**3])
        recovered, decision = controller.recovery_set, controller.decide(norms, step=step)
        log.append(
            StepEvent(
                step=step, loss=4.0 / step, grad_norm=2.0, learning_rate=1e-3, tokens=8 * step, tokens_per_second=8.0,
                step_seconds=1.0, control_seconds=0.0, recovered=[], updated=True, over_threshold=0,
                riskiest_unit=None, riskiest_score=0.0,
            )
        )  # fmt: skip
        matrix.append(
            step=step, updated=True, global_norm=2.0, norms=norms, gnmr=decision.gnmr, delta_gnmr=decision.delta_gnmr,
            recovered=recovered, selected=decision.selected,
        )  # fmt: skip
    log.close()
    matrix.close()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize(("page", "text"), PYTHON)
def test_python_examples_run(page, text):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, page, "exec"), {"__name__": "__main__"})
    assert printed.getvalue()
    if page == "other_trainers.md":
        reasons = [(30, "delta_gnmr"), (31, "lock"), (32, "lock")]
        assert printed.getvalue().splitlines() == [
            f"{step} [('0', '{why}')]" for step, why in reasons
        ]


@pytest.mark.parametrize(("page", "text"), YAML)
def test_yaml_examples_are_settings(page, text, tmp_path):
    (tmp_path / "settings.yaml").write_text(text)
    config, _ = parse_run(
        run_parser("docs", description="", epilog=""), ["--config", str(tmp_path / "settings.yaml")]
    )
    for section in yaml.safe_load(text):
        assert getattr(config, section), (page, section)


@pytest.mark.parametrize("page", TEXTS)
def test_files_that_a_page_names_exist(page):
    named = [
        item
        for item in in_backticks(TEXTS[page])
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]+", item)
    ]
    for path in named:
        assert list(ROOT.glob(path.rstrip("/"))), (page, path)


def test_the_table_of_the_run_folder_names_all_its_files():
    named = {item for cell in in_backticks(PAGES["run_folder.md"]) for item in [cell.split("/")[0]]}
    assert named >= set(FILES)


def test_the_semantics_name_all_policies_and_means():
    page = PAGES["semantics.md"]
    assert first_column(page, "`gnmr.policy`") == list(get_args(PolicyName))
    means = get_args(get_type_hints(ControlConfig)["mean"])
    assert first_column(page, "`gnmr.mean`") == list(means)


def test_the_table_of_precision_paths_names_all_paths():
    table = PAGES["precision.md"].partition("| path | GEMMs |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(PATHS)


def test_charts_that_the_pages_name_are_drawn():
    source = "".join(
        path.read_text() for path in (ROOT / "gnmr_megatron/observability").rglob("*.py")
    )
    charts = {
        item
        for text in TEXTS.values()
        for item in in_backticks(text)
        if re.fullmatch(r"(?:train|eval|perf|control)/[a-z_]+", item)
    }
    assert charts
    for chart in charts:
        assert f'"{chart}"' in source, chart


def fault_kinds():
    """Kinds of all faults that the program tells: constants that stand for `kind` in calls, or begin a trouble."""
    for path in (ROOT / "gnmr_megatron/training").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("fault", "_fault"):
                values = [word.value for word in node.keywords if word.arg == "kind"]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
                values = [arg.elts[0] for arg in node.args if isinstance(arg, ast.Tuple)]
            else:
                continue
            for value in values:
                parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                yield from (part.value for part in parts if isinstance(part, ast.Constant))


def test_every_kind_of_fault_is_told_of():
    found = set(fault_kinds())
    assert {"loss_spike", "non_finite_loss", "history_restart", "disk_full"} <= found
    assert found <= set(in_backticks(PAGES["faults.md"]))
    drills = yaml.safe_load(blocks(PAGES["faults.md"], "yaml")[0])["faults"]
    assert {drill["kind"] for drill in drills} == set(KINDS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_from_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", TEXTS[page]):
        assert (ROOT / target).exists(), target


def test_no_page_says_that_something_is_still_to_come():
    later = re.compile(
        r"\b(TODO|FIXME|coming soon|not yet implemented|work in progress)\b", re.IGNORECASE
    )
    assert [name for name, text in TEXTS.items() if later.search(text)] == []
    assert DOCS.joinpath("index.md").exists()
