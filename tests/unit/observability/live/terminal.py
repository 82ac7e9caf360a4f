"""A command on a pseudo-terminal, and what a person would see there."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pyte

# the terminal becomes that of the session, so that Ctrl-C arrives as a signal
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class TerminalSession:
    """Runs a command in a session of its own on a terminal of a given size."""

    def __init__(self, command, *, columns=80, rows=24, cwd=None, **environment):
        self.screen = pyte.HistoryScreen(columns, rows, history=500)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._leader, follower = pty.openpty()
        self._set_size(columns, rows)
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "JPY_PARENT_PID")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", TAKE_TERMINAL, *command],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=cwd,
            env={**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment},
            start_new_session=True,
        )
        os.close(follower)

    def _set_size(self, columns, rows):
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns, rows):
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def press(self, keys):
        os.write(self._leader, keys)

    def read(self, seconds=0.1):
        """Take in what comes within that time; returns whether the other end is still open."""
        if not select.select([self._leader], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._leader, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def lines(self):
        """The screen's rows, without what is empty at the end."""
        return [line.rstrip() for line in self.screen.display]

    def text(self):
        return "\n".join(self.lines())

    def scrollback(self):
        """All rows that have left the screen at the top."""
        return [
            "".join(row[column].data for column in sorted(row)).rstrip()
            for row in self.screen.history.top
        ]

    def wait_for(self, condition, seconds=30):
        """Read until `condition(self)` holds."""
        end = time.monotonic() + seconds
        while not condition(self):
            if not self.read() or time.monotonic() > end:
                assert condition(self), self.text()
        return self

    def finish(self, seconds=60):
        """Read to the end; the exit code."""
        end = time.monotonic() + seconds
        while self.read() and time.monotonic() < end:
            pass
        return self.process.wait(timeout=5)

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._leader)
