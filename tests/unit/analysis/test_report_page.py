"""The page: its numbers are those of the run's files, and nothing of a run becomes markup."""

import dataclasses
import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import yaml

from gnmr_megatron.analysis.report import page as page_module
from gnmr_megatron.analysis.report import write_report
from gnmr_megatron.analysis.report.tables import settings as settings_table
from gnmr_megatron.cli.main import main
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError, DataError
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import FaultEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from gnmr_megatron.observability.summary import summarize
from gnmr_megatron.training.config import RunConfig
from tests.unit.analysis.report_page import read_page
from tests.unit.observability.test_events import start_event, step_event
from tools.record_synthetic_run import record

BUSY = ControlConfig(alpha=1.8, beta=1.5, delta=4, max_recovered=2, lock_steps=3, warmup_steps=10)
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "busy"
    record(folder, num_layers=2, steps=300, config=BUSY, seed=3, shocks=0.01)
    config = {"name": "busy", "gnmr": dataclasses.asdict(BUSY), "data": {"datasets": [EVIL]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    return read_page(write_report([run], tmp_path_factory.mktemp("page") / "busy.report.html"))


def digits(values, number):
    return [float(f"{value:.{number}g}") for value in values]


def test_series_in_the_page_are_those_of_the_events(run, page):
    steps = [event for event in read_events(run / "events.jsonl") if isinstance(event, StepEvent)]
    series = page.json("series")
    assert series["step"] == [event.step for event in steps]
    assert series["loss"] == digits([event.loss for event in steps], 6)
    assert series["grad_norm"] == digits([event.grad_norm for event in steps], 4)
    assert series["recovered"] == [len(event.recovered) for event in steps]
    assert series["exceedance_percent"] == digits(
        [100 * event.over_threshold / 8 for event in steps], 4
    )
    assert series["control_percent"] == digits(
        [100 * event.control_seconds / event.step_seconds for event in steps], 3
    )


def test_the_map_in_the_page_is_that_of_the_matrix(run, page):
    matrix = read_risk_matrix(run)
    grid = page.meta["runs"][0]["grid"]
    gnmr = np.exp(page.codes() * grid["resolution"])
    assert gnmr.shape == matrix.gnmr.T.shape
    np.testing.assert_allclose(gnmr, matrix.gnmr.T, rtol=0.51 * grid["resolution"])
    assert page.meta["runs"][0]["units"] == list(matrix.units)


def test_listed_cells_hold_what_the_matrix_holds(run, page):
    matrix = read_risk_matrix(run)
    listed = page.json("cells")["listed"]
    rows = np.searchsorted(matrix.steps, listed["step"])
    assert len(listed["unit"]) == matrix.gnmr.size
    for name, values in (
        ("gnmr", matrix.gnmr),
        ("delta_gnmr", matrix.delta_gnmr),
        ("norm", matrix.norms),
    ):
        np.testing.assert_allclose(listed[name], values[rows, listed["unit"]], rtol=5.1e-4)


def test_large_runs_list_each_recovered_or_selected_cell(run, tmp_path, monkeypatch):
    monkeypatch.setattr("gnmr_megatron.analysis.report.blocks.ALL_LISTED", 100)
    page = read_page(write_report([run], tmp_path / "x.html"))
    matrix, listed = read_risk_matrix(run), page.json("cells")["listed"]
    rows, units = np.nonzero(matrix.recovered | matrix.selected)
    wanted = set(zip(units.tolist(), matrix.steps[rows].tolist(), strict=True))
    assert set(zip(listed["unit"], listed["step"], strict=True)) == wanted
    assert 0 < len(wanted) < matrix.gnmr.size


def test_spans_in_the_page_are_the_flags_of_the_matrix(run, page):
    matrix, spans = read_risk_matrix(run), page.json("cells")["spans"]
    flags = np.zeros_like(matrix.recovered)
    for unit, first, last in zip(spans["unit"], spans["first"], spans["last"], strict=True):
        flags[first - 1 : last, unit] = True
    assert (flags == matrix.recovered).all()


def test_figures_in_words_are_those_of_the_summary(run, page):
    summary = summarize(run)
    assert f"{summary.recovered_unit_steps:,} unit-steps" in page.text
    assert f"{summary.recovered_percent:.2g} % of all" in page.text
    assert f"held-out loss {summary.held_out_loss:.3f}" in page.text.lower()


def test_totals_by_layer_and_operator_are_those_of_the_matrix(run, page):
    counts = read_risk_matrix(run).recovered.sum(0).reshape(2, 4)
    for layer, row in enumerate(counts):
        assert " ".join(map(str, (layer, *row, row.sum()))) in page.text
    assert " ".join(map(str, ("All", *counts.sum(0), counts.sum()))) in page.text


def test_nothing_of_a_run_becomes_markup(run, page, tmp_path):
    hurt = tmp_path / "a<b>&amp;'\""
    shutil.copytree(run, hurt)
    log = EventLog(hurt)
    log.append(FaultEvent(step=300, kind=EVIL, rank=None, units=[EVIL], message=EVIL))
    log.append(step_event(301, recovered=[EVIL], riskiest_unit=EVIL, riskiest_score=9e9))
    log.close()
    hurt_page = read_page(write_report([hurt], tmp_path / "x.html"))
    assert EVIL in hurt_page.text
    assert [tag for tag, _ in hurt_page.tags if tag == "img"] == []
    assert hurt_page.scripts.keys() == page.scripts.keys()
    assert hurt_page.meta["runs"][0]["name"] == hurt.name
    assert hurt_page.meta["runs"][0]["units"][-1] == EVIL


def test_the_page_names_no_other_place(page):
    """Neither links nor scripts, styles or pictures from elsewhere; and its policy forbids them."""
    links = {
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href")
    }
    assert links == {"data:,", "#main"}
    policies = [
        a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == [
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    ]
    folder = page_module.files("gnmr_megatron.analysis.report") / "page"
    styles = "".join((folder / name).read_text() for name in page_module.STYLES)
    assert "url(" not in styles
    assert "@import" not in styles


def test_a_run_folder_is_left_as_it_is(run, tmp_path):
    def state():
        return {
            path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in run.iterdir()
        }

    before = state()
    write_report([run], tmp_path / "x.html")
    assert state() == before


def test_a_run_that_is_still_written_has_a_report(run, tmp_path):
    going = tmp_path / "going"
    shutil.copytree(run, going)
    events, matrix = going / "events.jsonl", going / "risk_matrix.bin"
    lines = events.read_bytes().splitlines(keepends=True)
    events.write_bytes(b"".join(lines[:150]) + lines[150][:40])
    matrix.write_bytes(matrix.read_bytes()[:10_000])
    text = read_page(write_report([going], tmp_path / "x.html")).text
    assert re.search(r"Not finished: \d+ of 300 steps so far", text)


def test_a_run_without_steps_has_a_report(tmp_path):
    log = EventLog(tmp_path)
    log.append(start_event())
    log.close()
    text = read_page(write_report([tmp_path], tmp_path.parent / "empty.html")).text
    assert "Not finished: 0 of 20 steps so far" in text
    assert "This run has no risk matrix" in text


def test_a_run_without_control_says_that_there_is_no_map(tmp_path):
    (tmp_path / "off").mkdir()
    log = EventLog(tmp_path / "off")
    control = dataclasses.asdict(ControlConfig(mode="disabled"))
    log.append(start_event(mode="disabled", control=control))
    for step in range(1, 5):
        log.append(step_event(step, riskiest_unit=None, riskiest_score=0.0))
    log.close()
    page = read_page(write_report([tmp_path / "off"], tmp_path / "x.html"))
    assert "no risk matrix, since control was off" in page.text
    assert page.json("cells")["listed"] is None


def test_runs_of_different_units_stand_side_by_side(run, tmp_path):
    record(tmp_path / "other", num_layers=1, steps=40, config=BUSY)
    page = read_page(write_report([run, tmp_path / "other"], tmp_path / "x.html"))
    assert [len(each["units"]) for each in page.meta["runs"]] == [8, 4]
    assert page.codes(0).shape == (8, 300)
    assert page.codes(1).shape == (4, 40)
    assert "The runs side by side" in page.text


def test_a_monitored_run_shows_what_it_would_have_recovered(tmp_path):
    config = dataclasses.replace(BUSY, mode="monitor")
    record(tmp_path / "watched", num_layers=1, steps=200, config=config, shocks=0.02)
    page = read_page(write_report([tmp_path / "watched"], tmp_path / "x.html"))
    matrix, spans = read_risk_matrix(tmp_path / "watched"), page.json("cells")["spans"]
    flags = np.zeros((201, 4), dtype=bool)
    for unit, first, last in zip(spans["unit"], spans["first"], spans["last"], strict=True):
        flags[first - 1 : last, unit] = True
    assert (flags[1:] == matrix.selected).all()
    assert matrix.selected.any()


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("events.jsonl", lambda text: text.replace(b'"schema_version": 1', b'"schema_version": 0', 1),
         r"events\.jsonl:1: .*schema_version 0"),
        ("events.jsonl", lambda text: text.replace(b'"loss"', b'"lass"', 1), r"events\.jsonl:2: "),
        ("units.json", lambda text: text.replace(b'"schema_version": 1', b'"schema_version": 7'),
         r"units\.json: has schema 7"),
        ("units.json", lambda text: text[:50], r"units\.json: cannot be read"),
        ("config.yaml", lambda text: b"a: [", r"config\.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_in_one_line(run, tmp_path, capsys, file, damage, message):
    shutil.copytree(run, tmp_path / "hurt")
    path = tmp_path / "hurt" / file
    path.write_bytes(damage(path.read_bytes()))
    output = tmp_path / "x.html"
    assert main(["report", str(tmp_path / "hurt"), "--output", str(output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not output.exists()


def test_the_verb_writes_beside_the_current_folder_and_replaces_only_reports(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.startswith("report     busy.report.html (2.")
    assert main(["report", str(run), "--json"]) == 0
    size = (tmp_path / "busy.report.html").stat().st_size
    assert json.loads(capsys.readouterr().out) == {"report": "busy.report.html", "bytes": size}
    (tmp_path / "busy.report.html").write_text("my notes")
    assert main(["report", str(run)]) == 2
    assert "is there already, and no report" in capsys.readouterr().err
    assert (tmp_path / "busy.report.html").read_text() == "my notes"


def test_outputs_that_cannot_be_are_refused(run, tmp_path):
    for output, message in (
        (run / "report.html", "lies in the run folder"),
        (tmp_path / "no" / "x.html", "there is no folder"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_report([run], output)
    with pytest.raises(DataError, match="is no run folder"):
        write_report([tmp_path], tmp_path / "x.html")


def test_settings_speak_of_no_secret():
    def keys(kind):
        for field in dataclasses.fields(kind):
            yield field.name
            hint = field.default_factory if callable(field.default_factory) else None
            if dataclasses.is_dataclass(hint):
                yield from keys(hint)

    assert not [key for key in keys(RunConfig) if re.search("secret|password|api_?key", key)]
    rows = settings_table({"tracking": {"engine_options": {"api_key": "abc"}, "wandb_name": "n"}})
    assert rows == [("tracking", [("engine_options.api_key", "(left out)"), ("wandb_name", "n")])]
