"""What a person sees of a real run on a terminal, and what a program reads."""

import json
import sys

from gnmr_megatron.observability.events import read_events
from tests.conftest import ROOT, TINY, options, run_cli
from tests.unit.observability.live.terminal import TerminalSession


def settings(dataset, runs, **changes):
    return options(
        {**TINY, "data.datasets": [str(dataset)], "runs_dir": runs, "train.steps": 8, **changes}
    )


def test_training_on_a_terminal_leaves_a_last_view_of_what_its_events_say(dataset, tmp_path):
    command = [sys.executable, "-m", "gnmr_megatron", "train"]
    arguments = settings(
        dataset, tmp_path, **{"tracking.console": "auto", "train.eval_interval": 4}
    )
    terminal = TerminalSession(
        [*command, *arguments], columns=100, rows=60, cwd=ROOT, OMP_NUM_THREADS="1"
    )
    try:
        assert terminal.finish(120) == 0
        text, screen = terminal.text(), terminal.screen
    finally:
        terminal.close()
    events = read_events(tmp_path / "run" / "events.jsonl")
    last = [event for event in events if event.name == "step"][-1]
    held_out = [event for event in events if event.name == "evaluation"][-1]
    view = text[text.index("\nrun   gnmr (active)") :]
    for part in (
        "step 8/8  100%  completed in",
        f"loss       {last.loss:8.4f}",
        f"gradient   {last.grad_norm:8.3g}",
        f"held-out   {held_out.loss:8.4f}",
        f"recovered  {f'{len(last.recovered)}/3':>8}",
        f"riskiest   {last.riskiest_score:8.2f}",
    ):
        assert part in view
    assert "\nsteps      8 (" in view  # the usual summary follows
    assert (screen.margins, screen.cursor.hidden) == (None, False)


def test_json_on_standard_output_is_the_log_line_by_line(dataset, tmp_path):
    result = run_cli("train", *settings(dataset, tmp_path, **{"tracking.console": "json"}))
    assert result.returncode == 0, result.stderr
    assert result.stdout == (tmp_path / "run" / "events.jsonl").read_text()
    assert json.loads(result.stdout.splitlines()[-1])["event"] == "finish"
