"""Many replays of one run at once, each in a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.replay import Figures, replay
from gnmr_megatron.analysis.stretches import Settings, changes_settings

_OPENED: list[RecordedRun] = []
"""The run that this worker process replays."""


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Each value of each key with each of the others; the last key changes fastest.

    Example:
        >>> list(combinations({"alpha": [2.0, 3.0], "delta": [8]}))
        [{'alpha': 2.0, 'delta': 8}, {'alpha': 3.0, 'delta': 8}]
    """
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def replay_grid(
    run: RecordedRun, grid: Sequence[Settings], *, tell: Callable[[], None] = lambda: None
) -> list[Figures]:
    """The figures of a replay with each of the settings, in their order.

    Uses as many processes as there are processors; scripts that call this need the usual
    `if __name__ == "__main__":`.

    Args:
        run: a recorded run; steps that it writes meanwhile are left out.
        grid: settings to replace.
        tell: called when a replay is done.

    Raises:
        ConfigError: a setting is out of range; before anything is replayed.
        DataError: there are no norms, or some are missing.
    """
    for changes in grid:
        changes_settings(run, changes)
    steps = run.matrix.steps
    last_step = int(steps[-1]) if len(steps) else 0
    with ProcessPoolExecutor(
        min(len(grid), len(os.sched_getaffinity(0))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_open,
        initargs=(run.folder, last_step),
    ) as pool:
        futures = [pool.submit(_figures, dict(changes)) for changes in grid]
        try:
            for done in as_completed(futures):
                done.result()
                tell()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _open(folder: Path, last_step: int) -> None:
    _OPENED.append(RecordedRun(folder, last_step=last_step))


def _figures(changes: dict[str, Any]) -> Figures:
    return replay(_OPENED[0], changes).figures
