import io

from gnmr_megatron.observability.events import FinishEvent, to_line
from gnmr_megatron.observability.live.watchers import FIRST_LINES, JsonWatcher, LinesWatcher
from tests.unit.observability.test_events import start_event, step_event


def history(count):
    return [start_event(time=0.0), *(step_event(step, time=step) for step in range(1, count + 1))]


def lines_watcher(now=0.0):
    out, clock = io.StringIO(), [now]
    watcher = LinesWatcher(file=out, clock=lambda: clock[0])
    return watcher, clock, lambda: out.getvalue().splitlines()


def test_lines_begin_with_the_last_ones_and_go_on_with_those_that_come():
    watcher, _, lines = lines_watcher()
    watcher.load(history(30))
    watcher.record(step_event(31, time=31.0))
    assert [int(line.split("/")[0].split()[1]) for line in lines()] == list(
        range(31 - FIRST_LINES, 32)
    )


def test_after_a_resume_only_what_is_new_is_printed():
    watcher, _, lines = lines_watcher()
    watcher.load(history(5))
    before = len(lines())
    resumed = start_event(4, time=20.0, resumed_from="step_00000003")
    watcher.load([*history(3), resumed, step_event(4, time=21.0)])
    assert [line.split()[0] for line in lines()[before:]] == ["start", "resume", "step"]


def test_silence_is_told_when_it_has_doubled_and_once_more_after_a_step():
    watcher, clock, lines = lines_watcher()
    watcher.load(history(5))
    before = len(lines())
    for clock[0] in (30.0, 70.0, 75.0, 134.0, 136.0, 200.0):
        watcher.idle()
    watcher.record(step_event(6, time=200.0))
    for clock[0] in (210.0, 265.0):
        watcher.idle()
    told = [line for line in lines()[before:] if line.startswith("waiting")]
    assert told == [
        "waiting    no step for 0:01:05",
        "waiting    no step for 0:02:11",
        "waiting    no step for 0:01:05",
    ]


def test_json_gives_the_events_that_come_and_those_that_a_resume_adds():
    out = io.StringIO()
    watcher = JsonWatcher(file=out)
    watcher.load(history(5))
    came = step_event(6, time=6.0)
    watcher.record(came)
    watcher.idle()
    added = [start_event(3, time=20.0), step_event(3, time=21.0)]
    watcher.load([*history(2), *added])
    watcher.close()
    assert out.getvalue() == "".join(map(to_line, [came, *added]))


def test_a_log_that_was_rewritten_before_the_start_is_json_too():
    out = io.StringIO()
    watcher = JsonWatcher(file=out)
    watcher.record(start_event(time=1.0))
    end = FinishEvent(step=1, reason="completed", loss=2.0, seconds=1.0, tokens=1, time=3.0)
    watcher.load([start_event(time=2.0), end])
    assert len(out.getvalue().splitlines()) == 3
