"""Every suite of the clone at its smallest size, as a newcomer takes it: `data/stdlib` is there and nothing else."""

import csv
import json
import math

import pytest

from tests.conftest import ROOT, run_cli

SUITES = sorted(path.stem for path in (ROOT / "configs/experiments").glob("*.yaml"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What the suites need of a clone, and their dataset."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("README.md", "configs", "docs", "gnmr_megatron"):
        (folder / name).symlink_to(ROOT / name)
    data = ["prepare-data", "stdlib:", "--output", "data/stdlib", "--vocab-size", "2048"]
    result = run_cli(*data, "--max-documents", "300", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("suite", SUITES)
def test_the_smoke_size_of_a_suite_runs_to_its_report(clone, suite):
    result = run_cli(
        "experiment", suite, "--smoke", "--jobs", "2", "--json", cwd=clone, timeout=800
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    output = clone / f"runs/experiments/{suite}-smoke"
    assert (output / "report.html").stat().st_size > 10_000
    assert suite in (output / "results.md").read_text()
    table = (output / "results.csv").read_text().splitlines()
    rows = {row["arm"]: row for row in csv.DictReader(table)}
    assert rows.keys() == told["arms"].keys()
    for arm, row in rows.items():
        assert row["finished"] == "completed", arm
        # below that of a model that has learnt nothing: every one of 2,048 tokens as likely as any other
        assert 0 < float(row["held_out_loss"]) < math.log(2048), arm
    if "random" in rows:  # a control that recovers as much as what it is compared with
        subject = "gnmr" if "gnmr" in rows else "two_sided"
        assert rows["random"]["recovered_unit_steps"] == rows[subject]["recovered_unit_steps"]


def test_injected_faults_are_answered(clone):
    arms = run_cli("experiment", "transient_faults", "--smoke", "--json", cwd=clone, timeout=800)
    told = json.loads(arms.stdout.splitlines()[-1])  # its runs are there already
    assert told["hit_rate"] >= 0.8  # of all bursts, and of those that raised a norm threefold
    assert told["burst_hit_rate"] >= 0.85  # chance recovers 2 of 16 units
    assert told["detection_delay"] <= 1
    assert told["false_rate"] <= 0.004
    # the burst, the bad batch and the gradient that underflows; a spike of the learning rate may raise no norm, and a
    # scale that saturates does not
    assert told["arms"]["two_sided"]["hit_rate"] >= 0.6
