"""The dashboard as W&B would get it, against what a tracker logs."""

import json
import os
import re
import subprocess
import sys

import pytest

from gnmr_megatron.observability.dashboards.scalars import evaluation_scalars, step_scalars
from gnmr_megatron.observability.events import EvaluationEvent
from tests.conftest import ROOT
from tests.unit.observability.test_events import step_event

SCRIPT = ROOT / "launch/wandb/create_dashboard.py"
NOWHERE = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": ""}
EVALUATION = EvaluationEvent(step=1, loss=1.0, perplexity=2.0, tokens=1, seconds=1.0)
SCALARS = {*step_scalars(step_event(1)), *evaluation_scalars(EVALUATION)}


def create(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, "--entity", "team", "--project", "mine", *arguments],
        env={**os.environ, **NOWHERE},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def view():
    result = create("--dry-run")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def panels(view):
    """Panels of each section, as (type, configuration)."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    return {
        section["name"]: [(panel["viewType"], panel["config"]) for panel in section["panels"]]
        for section in sections
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of wandb-workspaces' models
def test_it_is_a_view_of_the_project_that_wandb_knows_how_to_read(view):
    from wandb_workspaces.workspaces.internal import View

    assert (view["entity"], view["project"]) == ("team", "mine")
    assert View.model_validate(view).display_name == "GNMR control"


def test_each_section_is_there(panels):
    assert list(panels) == [
        "Loss",
        "Recovery",
        "Riskiest units",
        "Heat map",
        "Recovery sets",
        "Throughput",
        "Overhead of control",
    ]
    assert all(panels.values())


def test_lines_are_of_numbers_that_a_tracker_logs_over_the_optimizer_step(panels):
    lines = [
        config
        for section in panels.values()
        for kind, config in section
        if kind == "Run History Line Plot"
    ]
    drawn = {metric for config in lines for metric in config.get("metrics", [])}
    assert drawn == SCALARS - {"eval/perplexity", "train/updated"}
    assert all(config["xAxis"] == "_step" for config in lines)
    patterns = [config["metricRegex"] for config in lines if "metricRegex" in config]
    unit = "decoder.layers.3.mlp.linear_fc1"
    for name in (f"gnmr/{unit}", f"delta_gnmr/{unit}"):
        assert [bool(re.search(pattern, name)) for pattern in patterns].count(True) == 1


def test_pictures_and_tables_have_the_keys_that_the_tracker_uses(panels):
    text = json.dumps(panels)
    for key in ("heat_map", "recovery_set", "riskiest_units_table", "recovered_units_table"):
        assert f'"control/{key}"' in text
    for column in ("highest GNMR", "steps on the recovery path"):
        assert f'"value": "{column}"' in text


def test_without_a_network_it_says_so_in_a_line():
    result = create()
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("W&B did not take the workspace (")
