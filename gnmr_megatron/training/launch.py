"""Start the processes of a run on this machine, as torchrun would."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gnmr_megatron.training.interruption import Interruption


def start_processes(python_arguments: Sequence[str], num_processes: int) -> int:
    """Run `python ARGUMENTS` in so many processes that know of each other; returns the exit code."""
    # two threads a process would fight over the cores that the processes share
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    # a rank that fails has told why; the agent's own report would bury it
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"gnmr-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGHUP",  # what asks to stop is the ranks' business, see _pass_on
    )
    for number in Interruption.SIGNALS:
        signal.signal(number, _pass_on)
    try:
        elastic_launch(config, sys.executable)(*python_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            sys.stderr.write(f"gnmr-megatron: rank {rank} was killed by {name}\n")
            return 128 - failure.exitcode
        return int(failure.exitcode)  # the rank has said why
    except SignalException:
        return 128 + signal.SIGHUP
    return 0


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Hand a wish to stop to the ranks, which save; torch's agent would kill after 30 seconds those that still do."""
    ranks = psutil.Process().children()
    if not ranks:
        raise SystemExit(128 + number)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
