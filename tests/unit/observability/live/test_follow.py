import time

import pytest

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.event_log import FILE, EventLog
from gnmr_megatron.observability.events import DecisionEvent, FinishEvent, StepEvent, to_line
from gnmr_megatron.observability.live.follow import LogFollower, follow
from gnmr_megatron.observability.live.progress import RunProgress
from tests.unit.observability.test_events import start_event, step_event

FINISH = FinishEvent(step=5, reason="completed", loss=2.0, seconds=1.0, tokens=1)


def append(folder, *events):
    with (folder / FILE).open("a") as file:
        file.writelines(to_line(event) for event in events)


def steps(news):
    return [event.step for event in news.events if isinstance(event, StepEvent)]


def test_each_look_gives_what_came_since_the_last(tmp_path):
    follower = LogFollower(tmp_path / FILE)
    assert follower.look() is None
    append(tmp_path, start_event(), step_event(1))
    news = follower.look()
    assert (len(news.events), news.is_anew) == (2, False)  # it came while we were there
    assert follower.look().events == []
    append(tmp_path, step_event(2), step_event(3))
    assert steps(follower.look()) == [2, 3]


def test_a_half_written_line_waits_for_its_end(tmp_path):
    append(tmp_path, start_event())
    follower = LogFollower(tmp_path / FILE)
    assert len(follower.look().events) == 1
    line = to_line(step_event(1))
    for part in (line[:40], line[40:-1]):
        with (tmp_path / FILE).open("a") as file:
            file.write(part)
        assert follower.look().events == []
    with (tmp_path / FILE).open("a") as file:
        file.write("\n")
    assert steps(follower.look()) == [1]


@pytest.mark.parametrize("more", [0, 40])
def test_a_log_that_a_resume_has_replaced_is_read_anew(tmp_path, more):
    append(tmp_path, start_event(), *(step_event(step) for step in range(1, 11)))
    follower = LogFollower(tmp_path / FILE)
    assert steps(follower.look()) == list(range(1, 11))
    log = EventLog.resume(tmp_path, 6)
    log.append(start_event(7, resumed_from="step_00000006"))
    for step in range(7, 8 + more):  # also where the new file is longer than the old one was
        log.append(step_event(step, loss=9.0))
    log.close()
    news = follower.look()
    assert news.is_anew
    assert steps(news) == list(range(1, 8 + more))
    append(tmp_path, step_event(8 + more))
    assert steps(follower.look()) == [8 + more]


def test_a_resume_that_only_appends_is_no_break(tmp_path):
    append(tmp_path, start_event(), step_event(1))
    follower = LogFollower(tmp_path / FILE)
    follower.look()
    log = EventLog.resume(tmp_path, 1)
    log.append(start_event(2))
    log.close()
    assert not (news := follower.look()).is_anew
    assert [event.name for event in news.events] == ["start"]


@pytest.mark.parametrize("line", ["{broken\n", '{"event": "start", "schema_version": 0}\n'])
def test_a_broken_line_is_named(tmp_path, line):
    append(tmp_path, start_event(), step_event(1))
    follower = LogFollower(tmp_path / FILE)
    follower.look()
    with (tmp_path / FILE).open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=rf"{FILE}:3: is no event that this version knows"):
        follower.look()


def test_a_long_log_is_open_at_once_and_keeps_its_start_its_curve_and_its_end(tmp_path):
    count = 100_000
    decision = to_line(DecisionEvent(step=1, selected=[]))
    line = to_line(step_event(0, loss=0.125))
    with (tmp_path / FILE).open("w") as file:
        file.write(to_line(start_event(total_steps=count)))
        for step in range(1, count + 1):
            loss = 10.0 - 8.0 * step / count
            file.write(
                line.replace('"step": 0', f'"step": {step}').replace(
                    '"loss": 0.125', f'"loss": {loss!r}'
                )
            )
            if step % 3 == 0:
                file.write(decision)
    started = time.perf_counter()
    news = LogFollower(tmp_path / FILE).look()
    seconds = time.perf_counter() - started
    assert seconds < 5.0  # 0.1 s on a quiet machine
    assert len(news.events) < 5000
    progress = RunProgress()
    for event in news.events:
        progress.add(event)
    assert (progress.step, progress.total_steps, len(progress.recent)) == (count, count, 100)
    assert [event.step for event in progress.recent] == list(range(count - 99, count + 1))
    expected = [10.0 - 8.0 * (column + 0.5) / 20 for column in range(20)]
    assert progress.losses.columns(20) == pytest.approx(expected, abs=0.1)


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self, on_idle):
        self.told, self._on_idle = [], iter(on_idle)

    def load(self, events):
        self.told.append(["load", *(event.step for event in events)])

    def record(self, event):
        self.told.append([event.name, event.step])

    def idle(self):
        next(self._on_idle)()


def test_a_run_is_waited_for_then_shown_through_a_crash_and_a_resume_up_to_its_end(tmp_path):
    def resume():
        log = EventLog.resume(tmp_path, 2)
        log.append(start_event(3))
        log.close()

    said = []
    notes = Notes(
        [
            lambda: append(tmp_path, start_event(), step_event(1)),
            lambda: append(tmp_path, step_event(2), step_event(3)),
            lambda: None,  # it is killed
            resume,
            lambda: append(tmp_path, step_event(3), FINISH),
        ]
    )
    end = follow(tmp_path, notes, tell=said.append, poll_seconds=0.0)
    assert end == FINISH
    assert said == [f"{tmp_path}: waits for the run to begin"]
    assert notes.told == [
        ["start", 1],
        ["step", 1],
        ["step", 2],
        ["step", 3],
        ["load", 1, 1, 2, 3],
        ["step", 3],
        ["finish", 5],
    ]


def test_a_run_that_went_on_after_a_signal_is_not_over(tmp_path):
    signalled = FinishEvent(step=1, reason="signal", loss=2.0, seconds=1.0, tokens=1)
    append(tmp_path, start_event(), step_event(1), signalled, start_event(2))
    notes = Notes([lambda: append(tmp_path, FINISH)])
    assert follow(tmp_path, notes, tell=pytest.fail, poll_seconds=0.0) == FINISH
