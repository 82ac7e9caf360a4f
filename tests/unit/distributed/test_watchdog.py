"""The watchdog on a real store, with two ranks in one process."""

import threading
import time

import pytest
from torch.distributed import HashStore

from gnmr_megatron.distributed import watchdog
from gnmr_megatron.distributed.watchdog import RankPlace, Watchdog, describe, stalled_ranks


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "INTERVAL", 0.02)
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.06)
    monkeypatch.setattr(watchdog, "SLOW_SECONDS", 0.1)


def never(places):
    pytest.fail(f"called with {places}")


def make(store, rank, *, hang_seconds=60.0, on_slow=never, on_hang=never):
    return Watchdog(
        store, rank=rank, world_size=2, hang_seconds=hang_seconds, on_slow=on_slow, on_hang=on_hang
    )


def place(rank, step=3, activity="training", *, where="", waits=False, answers=True):
    return RankPlace(rank, step, activity, where, is_waiting=waits, answers=answers)


def test_each_rank_is_seen_where_it_is():
    store = HashStore()
    with make(store, 0) as first, make(store, 1) as second:
        first.progress(5, "training")
        second.progress(4, "reading data")
        time.sleep(0.1)
        here = [(p.rank, p.step, p.activity, p.answers) for p in first.places()]
        assert here == [(0, 5, "training", True), (1, 4, "reading data", True)]
        assert second.places()[0].step == 5


def test_a_rank_that_stopped_or_never_came_gives_no_sign_of_life():
    store = HashStore()
    with make(store, 0) as first:
        assert [p.answers for p in first.places()] == [True, False]
        assert "rank 1: never heard of" in describe(first.places())
        with make(store, 1) as second:
            second.progress(7, "training")
            time.sleep(0.1)
        lost = first.places()[1]
        assert (lost.step, lost.answers) == (7, False)
        assert "rank 1: no sign of life since step 7, training" in describe([lost])


def test_a_rank_without_progress_ends_the_run_with_all_places():
    called = threading.Event()
    found = []

    def on_hang(places):
        found.extend(places)
        called.set()

    with make(HashStore(), 0, hang_seconds=0.2, on_hang=on_hang) as dog:
        dog.progress(9, "training")
        assert called.wait(5)
    assert [(p.rank, p.step, p.answers) for p in found] == [(0, 9, True), (1, -1, False)]
    # this test waits in threading, not in a collective
    assert "threading.py" in found[0].where
    assert not found[0].is_waiting


def test_progress_keeps_a_run_alive():
    with make(HashStore(), 0, hang_seconds=0.3) as dog:
        for step in range(20):
            dog.progress(step, "training")
            time.sleep(0.05)


def test_a_step_far_longer_than_usual_is_told_once():
    told = []
    with make(HashStore(), 0, on_slow=told.append) as dog:
        for step in range(1, 7):
            dog.progress(step, "training")
            time.sleep(0.01)
        dog.progress(7, "training")
        time.sleep(1.0)
    assert len(told) == 1
    assert told[0][0].step == 7


@pytest.mark.parametrize(
    ("places", "stalled"),
    [
        ([place(0), place(1, answers=False), place(2)], [1]),
        ([place(0, where="a", waits=True), place(1, where="b"), place(2, where="a", waits=True)], [1]),
        ([place(0, 4, where="a", waits=True), place(1, 3, where="a", waits=True)], [1]),
        ([place(0, where="a", waits=True), place(1, where="a", waits=True)], []),
        ([place(0, where="a"), place(1, where="a")], []),
        # one that moves on is what the others wait for
        ([place(0, where="a", waits=True), place(1)], [1]),
        # all wait for their GPU
        ([place(0, where="a", waits=True), place(1, 3, "reading data", where="a", waits=True)], [1]),
        ([place(0, where="a", waits=True), place(1, 3, "saving", where="a", waits=True)], [0]),
    ],
)  # fmt: skip
def test_who_holds_up_the_others(places, stalled):
    assert stalled_ranks(places) == stalled


def test_ranks_that_are_alike_share_words():
    waiting = [place(rank, where="c10d.py:1 all_reduce", waits=True) for rank in (0, 1, 2, 5)]
    text = describe([*waiting, place(3, where="disk.py:7 read")])
    assert text == (
        "rank 3: step 3, training, is in disk.py:7 read; "
        "ranks 0-2, 5: step 3, training, waits in c10d.py:1 all_reduce"
    )
