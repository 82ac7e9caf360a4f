"""Work on batches in processes, with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

BATCH_RECORDS = 64

Item = TypeVar("Item")
Result = TypeVar("Result")


class Works(Protocol[Item, Result]):
    """What a process does with a batch."""

    def __call__(self, batch: list[Item], /) -> list[Result]:
        """Results of a batch."""


_of_process: dict[str, Any] = {}


def map_batches(
    items: Iterable[Item], build: Callable[..., Works[Item, Result]], *arguments: Any, workers: int
) -> Iterator[list[Result]]:
    """Results of batches of items in their order; a few batches a worker are in memory at once.

    Args:
        items: what to work on.
        build: makes what does the work, once in each process.
        arguments: of `build`.
        workers: processes; 1 works in this one.
    """
    iterator = iter(items)
    batches = iter(lambda: list(islice(iterator, BATCH_RECORDS)), [])
    if workers <= 1:
        yield from map(build(*arguments), batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(build, arguments),
    )
    with pool:
        pending: deque[Future[list[Result]]] = deque()
        for batch in batches:
            pending.append(pool.submit(_work, batch))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _start(build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _of_process["work"] = build(*arguments)


def _work(batch: list[Any]) -> Any:
    return _of_process["work"](batch)
