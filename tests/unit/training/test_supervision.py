"""The end of a run that stands still, in a process of its own."""

import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys, threading
from gnmr_megatron.distributed.watchdog import RankPlace
from gnmr_megatron.training import supervision
from gnmr_megatron.training.recorder import NullRecorder

class Recorder(NullRecorder):
    def fault(self, step, **what):
        {behaviour}

supervision.TELL_SECONDS = 0.5
end = supervision.end_hanging_run(Recorder(), rank=0, world_size=2, hang_seconds=9)
threading.Thread(target=lambda: threading.Event().wait(60)).start()  # as a rank that waits for another
end([RankPlace(0, 5, "training", "a.py:1 f", is_waiting=True), RankPlace(1, 5, "training", "", is_waiting=False)])
"""


@pytest.mark.parametrize(
    "behaviour",
    [
        "threading.Event().wait()",
        "raise OSError('gone')",
        "print(step, what['kind'], what['rank'], flush=True)",
    ],
)
def test_a_hanging_run_ends_whatever_its_recorder_does(behaviour):
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(behaviour=behaviour)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 1
    assert "no progress for 9 s (train.hang_timeout_seconds), waiting for rank 1" in result.stderr
    assert time.monotonic() - started < 45
    if behaviour.startswith("print"):
        assert result.stdout == "5 hang 1\n"
