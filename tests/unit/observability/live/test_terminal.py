"""The live view on real pseudo-terminals, looked at through a terminal emulator."""

import fcntl
import io
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from gnmr_megatron.observability.event_log import FILE, EventLog
from gnmr_megatron.observability.events import FinishEvent, to_line
from gnmr_megatron.observability.live.tracker import can_draw
from tests.unit.observability.live.terminal import TerminalSession
from tests.unit.observability.test_events import start_event, step_event

ROOT = Path(__file__).parents[4]
WATCH = [sys.executable, "-m", "gnmr_megatron", "watch"]
FINISH = FinishEvent(step=20, reason="completed", loss=2.0, seconds=131.0, tokens=1)

# a process that shows what it reads from standard input, an event a line; END closes the view
SHOW = """
import sys
from pathlib import Path
from gnmr_megatron.observability.events import from_line
from gnmr_megatron.observability.live.tracker import LiveTracker
from gnmr_megatron.observability.trackers import TrackerGroup, make_trackers
from gnmr_megatron.observability.config import TrackingConfig
trackers = make_trackers(Path(sys.argv[1]), TrackingConfig(wandb_mode="disabled"), run_config={})
for line in open(sys.argv[2]):
    if line == "END\\n":
        trackers.close()
        print("summary", flush=True)
    elif line.startswith("!"):
        eval(line[1:])
    else:
        trackers.record(from_line(line))
"""


class Show:
    """A process that trains, as far as its terminal can see."""

    def __init__(self, folder, **settings):
        self._fifo = folder / "fifo"
        os.mkfifo(self._fifo)
        command = [sys.executable, "-c", SHOW, str(folder), str(self._fifo)]
        self.terminal = TerminalSession(command, cwd=ROOT, **settings)
        self._pipe = self._fifo.open("w")

    def tell(self, *lines):
        for line in lines:
            self._pipe.write(line if isinstance(line, str) else to_line(line))
        self._pipe.flush()

    def end(self):
        self._pipe.close()
        return self.terminal.finish()

    def close(self):
        self._pipe.close()
        self.terminal.close()


@pytest.fixture
def show(tmp_path):
    shows = []

    def start(**settings):
        shows.append(Show(tmp_path, **settings))
        return shows[-1]

    yield start
    for each in shows:
        each.close()


@pytest.fixture
def watch(tmp_path):
    """Starts `watch` on a run folder, which is the working folder's `run`."""
    (tmp_path / "run").mkdir()
    terminals = []

    def start(**settings):
        terminals.append(
            TerminalSession([*WATCH, "run"], cwd=tmp_path, PYTHONPATH=str(ROOT), **settings)
        )
        return terminals[-1]

    yield start
    for each in terminals:
        each.close()


def append(folder, *events):
    with (folder / "run" / FILE).open("a") as file:
        file.writelines(to_line(event) for event in events)


def is_clean(terminal):
    """Whether the terminal scrolls as a whole, and has its cursor."""
    return terminal.screen.margins is None and not terminal.screen.cursor.hidden


def test_the_view_stays_at_the_bottom_whatever_other_processes_print_and_nothing_of_it_is_lost(
    show,
):
    session = show(columns=80, rows=24)
    terminal = session.terminal
    session.tell(start_event(), step_event(1, loss=2.5))
    terminal.wait_for(lambda t: "loss         2.5000" in t.text())
    for number in range(40):  # as another rank would, and a C library
        session.tell(
            f"!os.system('echo rank 3 warns {number} >&2')\n".replace("os.", "__import__('os').")
        )
    session.tell(step_event(2, loss=1.25))
    terminal.wait_for(lambda t: "loss         1.2500" in t.text() and "warns 39" in t.text())
    view = [line for line in terminal.lines() if line.startswith(("tiny ", "━", "loss", "faults"))]
    assert len(view) == 4
    assert terminal.lines()[-1].startswith("faults")
    session.tell(FINISH, "END\n")
    assert session.end() == 0
    seen = terminal.scrollback() + terminal.lines()
    assert [line for line in seen if "warns" in line] == [f"rank 3 warns {n}" for n in range(40)]
    assert sum("completed in 0:02:11" in line for line in seen) == 1  # the last view stays, once
    assert [line for line in terminal.lines() if line][-1] == "summary"
    assert is_clean(terminal)


def test_a_terminal_that_changes_its_size_is_drawn_anew(show):
    session = show(columns=100, rows=30)
    terminal = session.terminal
    session.tell(start_event(), step_event(1))
    terminal.wait_for(lambda t: t.lines()[-1].startswith("faults"))
    for columns, rows in ((60, 10), (120, 40)):
        terminal.resize(columns, rows)
        session.tell(step_event(2))
        terminal.wait_for(lambda t, rows=rows: t.screen.margins and t.lines()[rows - 1])
        shown = [line for line in terminal.lines() if "step 2/20" in line]
        assert len(shown) == 1
        assert max(map(len, terminal.lines())) < columns
    session.tell("END\n")
    assert session.end() == 0
    assert is_clean(terminal)


def test_no_colour_is_used_where_none_is_wanted(show):
    session = show(NO_COLOR="1")
    session.tell(start_event(), step_event(1, recovered=["a"], riskiest_score=3.0))
    session.terminal.wait_for(lambda t: "faults" in t.text())
    cells = [cell for row in session.terminal.screen.buffer.values() for cell in row.values()]
    assert {(cell.fg, cell.bg) for cell in cells} == {("default", "default")}


@pytest.fixture
def terminal_file(monkeypatch):
    """A terminal of 80 x 24 that is nobody's controlling terminal, as that of a rank."""
    leader, follower = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    with os.fdopen(follower, "w", encoding="utf-8") as file:
        fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        yield file
    os.close(leader)


def test_a_view_is_drawn_on_a_terminal_that_can_take_it(terminal_file, monkeypatch, tmp_path):
    assert can_draw(terminal_file)
    with (tmp_path / "file").open("w", encoding="utf-8") as file:
        assert not can_draw(file)
    assert not can_draw(io.StringIO())
    for name, value in (("TERM", "dumb"), ("JPY_PARENT_PID", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not can_draw(terminal_file)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)  # a job in the background
    assert not can_draw(terminal_file)
    monkeypatch.undo()
    fcntl.ioctl(terminal_file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    assert not can_draw(terminal_file)


def test_a_terminal_that_cannot_be_drawn_on_gets_lines(show):
    session = show(TERM="dumb")
    session.tell(start_event(), step_event(7), "END\n")
    assert session.end() == 0
    assert b"step  7/20  35%" in session.terminal.raw
    assert b"\x1b" not in session.terminal.raw


def test_a_process_that_fails_leaves_the_terminal_clean_with_its_traceback(show):
    session = show()
    session.tell(start_event(), step_event(1))
    session.terminal.wait_for(lambda t: "faults" in t.text())
    session.tell("!1/0\n")
    assert session.end() == 1
    assert "ZeroDivisionError" in session.terminal.text() + "\n".join(session.terminal.scrollback())
    assert is_clean(session.terminal)


def test_a_terminal_that_goes_away_does_not_stop_training(show, tmp_path):
    session = show()
    session.tell(start_event(), step_event(1))
    session.terminal.wait_for(lambda t: "faults" in t.text())
    done = tmp_path / "done"
    session.tell("!__import__('signal').signal(1, 1)\n")  # as nohup
    time.sleep(0.2)
    os.close(session.terminal._leader)
    session.terminal._leader = os.open(os.devnull, os.O_RDWR)
    session.tell(step_event(2, loss=9.0))
    time.sleep(0.7)
    session.tell(step_event(3), step_event(4), f"!open({str(done)!r}, 'w').close()\n")
    session._pipe.close()
    session.terminal.process.wait(timeout=20)
    assert done.exists()


def test_a_run_is_watched_from_before_its_start_through_a_resume_to_its_end(watch, tmp_path):
    terminal = watch(columns=80, rows=24)
    terminal.wait_for(lambda t: "run: waits for the run to begin" in t.text())
    append(tmp_path, start_event(), *(step_event(step, loss=8.0 - step) for step in range(1, 6)))
    terminal.wait_for(lambda t: "step 5/20" in t.text())
    assert "loss         3.0000  █▆▅▃▁  all steps" in terminal.text()
    log = EventLog.resume(tmp_path / "run", 3)
    log.append(start_event(4, resumed_from="step_00000003"))
    log.append(step_event(4, loss=6.5))
    log.close()
    terminal.wait_for(lambda t: "step 4/20" in t.text())
    assert "loss         6.5000" in terminal.text()
    append(tmp_path, step_event(20), FINISH)
    assert terminal.finish() == 0
    assert "completed in 0:02:11" in terminal.text()
    assert is_clean(terminal)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_watcher_that_is_stopped_leaves_the_terminal_clean(watch, tmp_path, number, code):
    append(tmp_path, start_event(), step_event(1))
    terminal = watch()
    terminal.wait_for(lambda t: "faults" in t.text())
    if number == signal.SIGINT:
        terminal.press(b"\x03")
    else:
        terminal.process.send_signal(number)
    assert terminal.finish() == code
    assert is_clean(terminal)
    assert "step 1/20" in terminal.text() + "\n".join(terminal.scrollback())


def piped(folder, *arguments, **environment):
    return subprocess.run(
        [*WATCH, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_piped_output_has_no_escape_bytes_even_where_a_cluster_asks_for_colours(tmp_path):
    (tmp_path / "run").mkdir()
    append(tmp_path, start_event(), *map(step_event, range(1, 21)), FINISH)
    colours = {"TERM": "xterm-256color", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    for arguments in (["run"], ["run", "--once"]):
        result = piped(tmp_path, *arguments, **colours)
        assert result.returncode == 0, result.stderr
        assert not {"\x1b", "\r"} & set(result.stdout)
        assert "step 20/20" in result.stdout
