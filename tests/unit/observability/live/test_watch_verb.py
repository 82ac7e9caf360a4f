import json

import pytest

from gnmr_megatron.cli.main import main
from gnmr_megatron.observability.event_log import FILE
from gnmr_megatron.observability.events import FinishEvent, to_line
from tests.unit.observability.test_events import start_event, step_event


def run_folder(folder, *events, tail=""):
    with (folder / FILE).open("w") as file:
        file.writelines(to_line(event) for event in events)
        file.write(tail)
    return folder


def test_once_shows_a_run_that_still_goes_on_with_half_a_line_at_its_end(tmp_path, capsys):
    run = run_folder(tmp_path, start_event(), step_event(3), tail=to_line(step_event(4))[:50])
    before = (run / FILE).read_bytes()
    assert main(["watch", str(run), "--once"]) == 0
    assert "step 3/20   15%" in capsys.readouterr().out
    assert (run / FILE).read_bytes() == before
    assert [path.name for path in run.iterdir()] == [FILE]


def test_once_as_json_is_one_object(tmp_path, capsys):
    run = run_folder(tmp_path, start_event(), step_event(3, loss=float("nan")))
    assert main(["watch", str(run), "--once", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["total_steps"], shown["loss"]) == (3, 20, "nan")
    assert shown["riskiest"] == [{"unit": "decoder.layers.3.mlp.linear_fc1", "score": 0.5}]


def test_a_run_that_has_ended_is_shown_and_left(tmp_path, capsys):
    end = FinishEvent(step=3, reason="completed", loss=2.0, seconds=1.0, tokens=1)
    run = run_folder(tmp_path, start_event(), step_event(3), end)
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("finish     completed at step 3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken\n", r"events.jsonl:2: is no event that this version knows"),
        ('{"event": "start", "schema_version": 0}\n', r"schema_version 0; this version reads 1"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--once"]])
def test_a_log_that_cannot_be_read_is_refused(tmp_path, capsys, line, message, options):
    run = run_folder(tmp_path, start_event(), tail=line)
    assert main(["watch", str(run), *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_what_is_no_run_is_refused(tmp_path, capsys):
    run_folder(tmp_path)
    for path, message in (
        (tmp_path / "nothing", "is no run folder, it has no events.jsonl"),
        (tmp_path, "has no start event yet"),
        (tmp_path / FILE, "is a file; a run folder is needed"),
    ):
        assert main(["watch", str(path), "--once"]) == 2
        assert message in capsys.readouterr().err
