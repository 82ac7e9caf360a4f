import threading
import time

import pytest

from gnmr_megatron.observability.dashboards.background import BackgroundTracker
from tests.unit.observability.test_events import step_event


class Waiting:
    """Shows nothing until it may."""

    def __init__(self):
        self.may_go, self.seen, self.closed = threading.Event(), [], False

    def record(self, event):
        self.may_go.wait(10)
        self.seen.append(event.step)

    def close(self):
        self.closed = True


def test_nobody_waits_for_a_tracker_and_it_misses_nothing():
    inner = Waiting()
    tracker = BackgroundTracker(inner, close_seconds=10, advice="")
    began = time.monotonic()
    for step in range(100):
        tracker.record(step_event(step))
    assert time.monotonic() - began < 5
    assert inner.seen == []
    inner.may_go.set()
    tracker.close()
    assert inner.seen == list(range(100))
    assert inner.closed


def test_one_that_never_ends_is_left_behind():
    inner = Waiting()
    tracker = BackgroundTracker(inner, close_seconds=0.1, advice="go away")
    tracker.record(step_event(1))
    with pytest.raises(TimeoutError, match="Waiting isn't done 0 s after the end; go away"):
        tracker.close()
    inner.may_go.set()


def test_what_it_raises_comes_with_a_later_call():
    class Failing(Waiting):
        def record(self, event):
            raise ConnectionError("network is down")

    tracker = BackgroundTracker(Failing(), close_seconds=10, advice="")
    tracker.record(step_event(1))
    with pytest.raises(RuntimeError, match="Failing raised ConnectionError: network is down"):
        tracker.close()
    with pytest.raises(RuntimeError, match="Failing raised ConnectionError: network is down"):
        tracker.record(step_event(2))
