"""Every verb over recorded runs refuses or bears a run that is not whole, in one line, and changes nothing."""

import hashlib
import json

import pytest

from gnmr_megatron.cli.main import main
from gnmr_megatron.control.config import ControlConfig
from tests.unit.analysis.recorded import lively_norms, record

VERBS = {
    "replay": ["--json"],
    "explain": ["--step", "5", "--json"],
    "diff": ["--json"],
    "calibrate": ["--target-exceedance", "0.01", "--max-recovered", "2", "--json"],
}
CONFIG = ControlConfig(mode="monitor", warmup_steps=3)


@pytest.fixture
def folder(tmp_path):
    return record(tmp_path / "run", lively_norms(150, 8), CONFIG)


def call(verb, folder, capsys):
    """Exit code and output of a verb, which must not have touched the folder."""
    before = contents(folder)
    runs = [str(folder)] * (2 if verb == "diff" else 1)
    code = main([verb, *runs, *VERBS[verb]])
    assert contents(folder) == before
    return code, capsys.readouterr()


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def cut_events(folder):
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def cut_both(folder):
    cut_events(folder)
    path = folder / "risk_matrix.bin"
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("damage", [cut_events, cut_both])
def test_a_run_that_is_still_being_written_is_read(verb, damage, folder, capsys):
    damage(folder)
    code, printed = call(verb, folder, capsys)
    assert (code, printed.err) == (0, "")
    assert json.loads(printed.out)


def rewrite(path, change):
    path.write_text(change(path.read_text()))


DAMAGES = {
    "is no run folder": lambda folder: (folder / "events.jsonl").unlink(),
    "has no start event yet": lambda folder: (folder / "events.jsonl").write_text(""),
    "schema_version 0; this version reads 1": lambda folder: rewrite(
        folder / "events.jsonl",
        lambda text: text.replace('"schema_version": 1', '"schema_version": 0'),
    ),
    "has schema 0, not 1": lambda folder: rewrite(
        folder / "units.json",
        lambda text: text.replace('"schema_version": 1', '"schema_version": 0'),
    ),
    "holds no risk matrix": lambda folder: (folder / "units.json").unlink(),
    "units.json: ": lambda folder: (folder / "units.json").write_text('{"schema_version": 1}'),
    "events.jsonl:1: is no event": lambda folder: rewrite(
        folder / "events.jsonl", lambda text: text.replace('"run": ', '"ran": ', 1)
    ),
    "are not of this version": lambda folder: rewrite(
        folder / "events.jsonl", lambda text: text.replace('"alpha": 3.0', '"alpha": -3.0', 1)
    ),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("message", DAMAGES)
def test_a_run_that_cannot_be_read_is_refused_in_one_line(verb, message, folder, capsys):
    DAMAGES[message](folder)
    code, printed = call(verb, folder, capsys)
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert str(folder) in printed.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_without_a_step_is_refused_in_one_line(verb, folder, capsys):
    (folder / "risk_matrix.bin").write_bytes(b"")
    code, printed = call(verb, folder, capsys)
    assert (code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert str(folder) in printed.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_without_control_is_refused_in_one_line(verb, tmp_path, capsys):
    folder = record(tmp_path / "off", lively_norms(30, 4), ControlConfig(mode="disabled"))
    code, printed = call(verb, folder, capsys)
    assert (code, printed.out, printed.err.count("\n")) == (2, "", 1)
