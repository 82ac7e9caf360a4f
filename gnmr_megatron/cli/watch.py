"""`gnmr-megatron watch RUN`: the live view of a run that another process trains."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.event_log import FILE
from gnmr_megatron.observability.events import strict_json
from gnmr_megatron.observability.live.follow import LogFollower, Watcher, follow
from gnmr_megatron.observability.live.progress import RunProgress
from gnmr_megatron.observability.live.tracker import can_draw
from gnmr_megatron.observability.live.unit_risks import UnitRisks
from gnmr_megatron.observability.live.view import RISKIEST, WIDEST, Snapshot, render
from gnmr_megatron.observability.live.watchers import JsonWatcher, LinesWatcher, LiveWatcher

DESCRIPTION = """\
Show a run that another process trains: from another terminal, or from another machine over a shared file system.
Reads the run folder twice a second and asks nothing of the run. Waits for a run that has not begun, and for one that
was killed, since it may be resumed; ends with 0 when the run ends. Ctrl-C leaves it; the run does not notice.

On a terminal it is the view that training shows; piped, plain lines."""


def run(arguments: Sequence[str]) -> int:
    """Follow a run, or tell where it stands."""
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron watch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="run folder, such as runs/quickstart")
    parser.add_argument("--once", action="store_true", help="print where the run stands, and end")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print each event that comes, as its line of events.jsonl; with --once, one object of the present state",
    )
    options = parser.parse_args(arguments)
    if options.run.is_file():
        raise DataError(
            f"{options.run}: is a file; a run folder is needed, such as runs/quickstart"
        )
    if options.once:
        _print_once(options.run, as_json=options.json)
        return 0
    # an exit, so that the view is closed
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    watcher = _watcher(options.run, as_json=options.json)
    try:
        follow(options.run, watcher, tell=_tell)
    except BrokenPipeError:
        pass  # whoever read, as `head`, has enough
    finally:
        watcher.close()
        signal.signal(signal.SIGTERM, before)
    return 0


def _watcher(folder: Path, *, as_json: bool) -> Watcher:
    if as_json:
        return JsonWatcher()
    return LiveWatcher(folder) if can_draw(sys.stdout) else LinesWatcher()


def _tell(text: str) -> None:
    sys.stderr.write(f"gnmr-megatron watch: {text}\n")


def _print_once(folder: Path, *, as_json: bool) -> None:
    news = LogFollower(folder / FILE).look()
    if news is None:
        raise DataError(f"{folder}: is no run folder, it has no {FILE}")
    progress = RunProgress()
    for event in news.events:
        progress.add(event)
    if progress.start is None:
        raise DataError(
            f"{folder / FILE}: has no start event yet; the run is still being set up, or it failed there"
        )
    risks = UnitRisks(folder).riskiest(progress, RISKIEST)
    if as_json:
        riskiest = [{"unit": risk.unit, "score": risk.score} for risk in risks]
        print(json.dumps(strict_json({**progress.as_dict(), "riskiest": riskiest})))
        return
    is_terminal = sys.stdout.isatty()
    console = Console(
        force_terminal=is_terminal,
        force_jupyter=False,
        width=None if is_terminal else int(os.environ.get("COLUMNS", WIDEST)),
    )
    seen = Snapshot(progress=progress, risks=risks, now=time.time())
    for row in render(seen, width=console.width, height=sys.maxsize):
        console.print(row, highlight=False)
