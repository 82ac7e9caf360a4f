from gnmr_megatron.observability.trackers import TrackerGroup
from tests.unit.observability.test_events import step_event


class Working:
    def __init__(self):
        self.seen, self.closed = [], False

    def record(self, event):
        self.seen.append(event.step)

    def close(self):
        self.closed = True


class Failing(Working):
    def record(self, event):
        super().record(event)
        raise ConnectionError("network is down")


def test_a_tracker_that_fails_is_dropped_with_one_line_and_the_others_go_on(capsys):
    working, failing = Working(), Failing()
    group = TrackerGroup([failing, working])
    for step in (1, 2, 3):
        group.record(step_event(step))
    group.close()
    assert working.seen == [1, 2, 3]
    assert working.closed
    assert failing.seen == [1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "Failing failed and is off from here on (ConnectionError: network is down)"
    )
