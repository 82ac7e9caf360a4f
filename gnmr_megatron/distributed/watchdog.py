"""Know how far every rank is, and end a run that stands still with a message that names who holds it up.

A thread of each rank publishes its place to the store through which the ranks met, once a second; nothing is added to
the training step. The store lies with the first node's launcher, so it outlives a rank.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from types import FrameType
from typing import Any, Protocol

INTERVAL = 1.0
"""Seconds between two signs of life."""

LOOK_SECONDS = 3 * INTERVAL
"""How long it takes to see who gives signs of life."""

STORE_SECONDS = 10.0
"""A store that does not answer for so long is lost."""

SLOW_FACTOR, SLOW_SECONDS = 5.0, 5.0
"""A step is slow that takes so many times the usual time, and at least so many seconds."""

# the last two: on GPUs a collective returns at once, and the host waits where it reads the result
_WAITING = (
    "torch/distributed/",
    "pipeline_parallel/p2p_communication",
    "param_and_grad_buffer",
    "gnmr_megatron/distributed/consensus.py",
    "gnmr_megatron/training/pipeline.py",
)

_ORDER = ("starting", "reading data", "measuring recovery gaps", "training")
"""Activities of a step in their order; all others come after them."""


class KeyValueStore(Protocol):
    """What is needed of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there."""


@dataclass(frozen=True)
class RankPlace:
    """How far a rank is.

    Attributes:
        rank: its number.
        step: the step that it is in; -1 where it has never been heard of.
        activity: what it does, in words.
        where: innermost line of Python of its main thread, where it has stood for a while; empty where it moves on.
        is_waiting: whether that line waits for other ranks.
        answers: whether it gives signs of life.
    """

    rank: int
    step: int
    activity: str
    where: str
    is_waiting: bool
    answers: bool = True


class Watchdog:
    """Publishes this rank's place and judges the run's.

    Args:
        store: shared by all ranks; used by the watchdog's thread alone.
        rank: of this process.
        world_size: ranks of the run.
        hang_seconds: a rank that makes no progress for so long ends the run.
        on_slow: called once in a slow step, with the places of all ranks; on rank 0 only.
        on_hang: called when the run stands still, with the places of all ranks; expected not to return.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        world_size: int,
        hang_seconds: float,
        on_slow: Callable[[Sequence[RankPlace]], None],
        on_hang: Callable[[Sequence[RankPlace]], None],
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._hang_seconds = hang_seconds
        self._on_slow, self._on_hang = on_slow, on_hang
        self._main_thread = threading.get_ident()
        self._place = (0, "starting")
        self._since = time.monotonic()
        self._step_started: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=32)
        self._told_step = -1
        self._beat = 0
        self._stopped = threading.Event()
        # a store whose host is gone may block whoever asks it: publishing and judging are apart
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._keep_publishing, self._watch)
        ]

    def __enter__(self) -> Watchdog:
        self._since = time.monotonic()
        self._publish()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(STORE_SECONDS)

    def progress(self, step: int, activity: str) -> None:
        """Note that this rank begins something else; costs a microsecond."""
        now = time.monotonic()
        if step != self._place[0]:
            if self._step_started is not None:
                self._step_seconds.append(now - self._step_started)
            self._step_started = now
        self._place, self._since = (step, activity), now

    def still_there(self) -> None:
        """Note that this rank goes on with what it does."""
        self._since = time.monotonic()

    def places(self) -> list[RankPlace]:
        """Where every rank is; takes a few seconds, to see who gives signs of life.

        Raises:
            RuntimeError: the store does not answer.
        """
        before = self._read()
        time.sleep(LOOK_SECONDS)
        after = self._read()
        found = []
        for rank in range(self._world_size):
            record = after.get(rank)
            if record is None:
                found.append(RankPlace(rank, -1, "", "", is_waiting=False, answers=False))
                continue
            answers = rank == self._rank or record != before.get(rank)
            found.append(
                RankPlace(
                    rank,
                    record["step"],
                    record["activity"],
                    record["where"],
                    is_waiting=record["is_waiting"],
                    answers=answers,
                )
            )
        return found

    def _read(self) -> dict[int, dict[str, Any]]:
        keys = {rank: f"watchdog/{rank}" for rank in range(self._world_size)}
        there = [rank for rank, key in keys.items() if self._store.check([key])]
        values = self._store.multi_get([keys[rank] for rank in there]) if there else []
        return {rank: json.loads(value) for rank, value in zip(there, values, strict=True)}

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL):
            idle = time.monotonic() - self._since
            if idle > self._hang_seconds:
                places = self._places_or_own()
                if time.monotonic() - self._since < idle:
                    continue  # it went on while we looked
                self._on_hang(places)
                return
            if self._rank == 0 and self._is_slow(idle):
                self._told_step = self._place[0]
                self._on_slow(self._places_or_own())

    def _is_slow(self, idle: float) -> bool:
        if self._told_step == self._place[0] or len(self._step_seconds) < 3:
            return False
        return idle > max(SLOW_SECONDS, SLOW_FACTOR * statistics.median(self._step_seconds))

    def _keep_publishing(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self._publish()

    def _publish(self) -> None:
        self._beat += 1
        own = self._own_place()
        record = json.dumps({**asdict(own), "beat": self._beat})
        with contextlib.suppress(RuntimeError):  # its host is away: others will miss this rank
            self._store.set(f"watchdog/{self._rank}", record)

    def _own_place(self) -> RankPlace:
        step, activity = self._place
        idle = time.monotonic() - self._since
        frames = _innermost(sys._current_frames().get(self._main_thread))
        if idle < 2 * INTERVAL or not frames:
            return RankPlace(self._rank, step, activity, "", is_waiting=False)
        is_waiting = any(part in frame for frame in frames for part in _WAITING)
        return RankPlace(self._rank, step, activity, frames[0], is_waiting=is_waiting)

    def _places_or_own(self) -> list[RankPlace]:
        """The places of all ranks, or of this one where the store does not answer in time."""
        found: list[RankPlace] = []

        def look() -> None:
            with contextlib.suppress(RuntimeError):
                found.extend(self.places())

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(LOOK_SECONDS + STORE_SECONDS)
        return list(found) or [self._own_place()]


def _innermost(frame: FrameType | None, count: int = 3) -> list[str]:
    """The innermost lines of Python that a thread is in, `path:line function`, innermost first."""
    lines: list[str] = []
    while frame is not None and len(lines) < count:
        path = "/".join(frame.f_code.co_filename.split("/")[-3:])
        lines.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def stalled_ranks(places: Sequence[RankPlace]) -> list[int]:
    """Who holds up the others: silent ranks; else those that do not wait; else those behind; empty if none differs.

    On GPUs all may wait, those at fault too: then it is told by what they do in which step.
    """
    silent = [place.rank for place in places if not place.answers]
    if silent:
        return silent
    busy = [place.rank for place in places if not place.is_waiting]
    if busy and len(busy) < len(places):
        return busy
    first = min(_progress(place) for place in places)
    behind = [place.rank for place in places if _progress(place) == first]
    return behind if len(behind) < len(places) else []


def _progress(place: RankPlace) -> tuple[int, int]:
    """Sorts places by how far they are."""
    known = place.activity in _ORDER
    return place.step, _ORDER.index(place.activity) if known else len(_ORDER)


def describe(places: Sequence[RankPlace]) -> str:
    """The place of each rank, ranks that are alike together."""

    def words(place: RankPlace) -> str:
        at = f"step {place.step}, {place.activity}"
        if place.step < 0:
            return "never heard of"
        if not place.answers:
            return f"no sign of life since {at}"
        if not place.where:
            return f"{at}"
        return f"{at}, {'waits' if place.is_waiting else 'is'} in {place.where}"

    by_words = sorted(places, key=lambda place: (words(place), place.rank))
    groups = [
        (text, [place.rank for place in group]) for text, group in groupby(by_words, key=words)
    ]
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)}: {text}" for text, ranks in groups
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Runs of numbers as first-last."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
