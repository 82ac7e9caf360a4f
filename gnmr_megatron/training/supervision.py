"""What is told, and done, when ranks are slow, lost, or stand still."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from gnmr_megatron.distributed.watchdog import (
    LOOK_SECONDS,
    RankPlace,
    Watchdog,
    describe,
    stalled_ranks,
)
from gnmr_megatron.errors import ClusterError
from gnmr_megatron.training.recorder import RecordsRun

RUN_ERROR = 1
TELL_SECONDS = 5.0


def tell_slow_step(recorder: RecordsRun) -> Callable[[Sequence[RankPlace]], None]:
    """Makes an event of a step that takes much longer than usual; names the rank that the others wait for."""

    def tell(places: Sequence[RankPlace]) -> None:
        slow = stalled_ranks(places)
        recorder.fault(
            max(place.step for place in places),
            kind="slow_rank",
            rank=slow[0] if len(slow) == 1 else None,
            message=f"the step takes much longer than usual, waiting for {names_of(slow)}: {describe(places)}",
        )

    return tell


def end_hanging_run(
    recorder: RecordsRun, *, rank: int, world_size: int, hang_seconds: float
) -> Callable[[Sequence[RankPlace]], None]:
    """Ends this process; the first rank that still answers says why, and rank 0 writes it to the log.

    Called by the watchdog's thread: the main thread waits for ranks that do not come.
    """

    def end(places: Sequence[RankPlace]) -> None:
        stalled = stalled_ranks(places)
        alone = (
            ""
            if len(places) == world_size
            else "; the store of the run, on the first node, does not answer"
        )
        message = (
            f"no progress for {hang_seconds:g} s (train.hang_timeout_seconds), waiting for {names_of(stalled)}: "
            f"{describe(places)}{alone}"
        )
        if rank == min((place.rank for place in places if place.answers), default=rank):
            sys.stderr.write(f"gnmr-megatron train: rank {rank}: {message}\n")
            sys.stderr.flush()
        else:
            time.sleep(2 * LOOK_SECONDS)  # the end of this rank would change what the speaker sees
        _tell_and_exit(
            partial(
                recorder.fault,
                max(place.step for place in places),
                kind="hang",
                rank=stalled[0] if len(stalled) == 1 else None,
                message=message,
            )
        )

    return end


def stop_without_checkpoint(
    recorder: RecordsRun, step: int, saved_step: int, stop_seconds: float
) -> None:
    """End this process: a signal asked to stop, and the checkpoint is not complete in time."""
    message = (
        f"not stopped {stop_seconds:g} s after the signal (checkpoint.stop_seconds): ends without saving step {step}; "
        f"the last checkpoint is that of step {saved_step}"
    )
    sys.stderr.write(f"gnmr-megatron train: {message}\n")
    sys.stderr.flush()
    _tell_and_exit(partial(recorder.fault, step, kind="stopped_late", message=message))


def _tell_and_exit(tell: Callable[[], None]) -> NoReturn:
    """End this process at once: other threads, and destructors, may wait for ranks that do not come.

    The main thread may stand in the recorder itself, on a disk that does not answer, so telling has little time.
    """
    try:
        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(TELL_SECONDS)
    finally:
        os._exit(RUN_ERROR)


def lost_ranks(watchdog: Watchdog, recorder: RecordsRun, error: Exception) -> ClusterError | None:
    """The error to raise in place of a failed collective, where ranks gave up their lives; None where all live."""
    try:
        places = watchdog.places()
    except RuntimeError as problem:
        return ClusterError(
            f"a collective failed ({_first_line(error)}), and the store of the run does not answer "
            f"({_first_line(problem)}): the first node or the network to it is lost; restart the run with "
            "--resume auto"
        )
    silent_places = [place for place in places if not place.answers]
    if not silent_places:
        return None
    silent = [place.rank for place in silent_places]
    message = f"lost {names_of(silent)}: {describe(silent_places)}"
    recorder.fault(
        max(place.step for place in places),
        kind="lost_rank",
        rank=silent[0] if len(silent) == 1 else None,
        message=message,
    )
    return ClusterError(f"{message}; restart the run with --resume auto")


def names_of(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    if not ranks:
        return "no rank in particular"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:16]))}" + (" and more" if len(ranks) > 16 else "")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
