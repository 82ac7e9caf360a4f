"""A process is killed with -9 while it appends events and norms as fast as it can; then the run goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import read_events
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter, read_risk_matrix
from tests.unit.observability.test_events import step_event
from tests.unit.observability.test_risk_matrix import UNITS

ROOT = Path(__file__).parents[3]
ENDLESS = (
    "import pathlib, sys\n"
    "from tests.unit.observability.test_crash import run\n"
    "run(pathlib.Path(sys.argv[1]), after=int(sys.argv[2]), to=10**9)\n"
)


def run(folder, *, after, to):
    log, matrix = EventLog.resume(folder, after), RiskMatrixWriter.resume(folder, UNITS, after)
    for step in range(after + 1, to + 1):
        log.append(step_event(step, recovered=[UNITS.ids[step % 4]] * 200))  # lines of 8 kB
        norms = np.full(4, float(step))
        matrix.append(
            step=step,
            updated=True,
            global_norm=2.0 * step,
            norms=norms,
            gnmr=norms,
            delta_gnmr=norms,
            recovered=np.array([step % 4]),
            selected=np.array([], dtype=np.int64),
        )
    log.close()
    matrix.close()


def kill_while_writing(folder, *, after):
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, folder, str(after)], cwd=ROOT)
    path = folder / "risk_matrix.bin"
    size = path.stat().st_size if path.exists() else 0
    end = time.monotonic() + 20
    while time.monotonic() < end and not (path.exists() and path.stat().st_size > size + 4000):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_run_that_is_killed_while_writing_has_each_step_once_after_it_resumes(tmp_path):
    kill_while_writing(tmp_path, after=0)
    taken = [event.step for event in read_events(tmp_path / "events.jsonl")]
    assert taken == list(range(1, len(taken) + 1))
    for name in ("events.jsonl", "risk_matrix.bin"):  # a kill rarely falls into a write
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"event": "st')
    kill_while_writing(tmp_path, after=7)
    run(tmp_path, after=9, to=12)
    assert [event.step for event in read_events(tmp_path / "events.jsonl")] == list(range(1, 13))
    matrix = read_risk_matrix(tmp_path)
    assert matrix.steps.tolist() == list(range(1, 13))
    np.testing.assert_array_equal(matrix.norms, np.arange(1.0, 13.0)[:, None].repeat(4, axis=1))
    np.testing.assert_array_equal(np.argmax(matrix.recovered, axis=1), np.arange(1, 13) % 4)
    lines = (tmp_path / "events.superseded.jsonl").read_bytes().splitlines()
    assert lines.count(b'{"event": "st') == 1
    assert len(lines) >= len(taken) - 7


def test_a_resume_that_is_interrupted_can_be_taken_again(tmp_path, monkeypatch):
    run(tmp_path, after=0, to=5)
    before = (tmp_path / "events.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            EventLog.resume(tmp_path, 3)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    EventLog.resume(tmp_path, 3).close()
    steps = [event.step for event in read_events(tmp_path / "events.jsonl")]
    assert steps == [1, 2, 3]
    dead = (tmp_path / "events.superseded.jsonl").read_text().splitlines(keepends=True)
    assert set(dead) == set(before.decode().splitlines(keepends=True)[3:])


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_resume_at_the_last_step_changes_nothing(tmp_path):
    run(tmp_path, after=0, to=5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run(tmp_path, after=5, to=5)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
