"""A run of two units as the recorder writes it, for tests of trackers; its numbers are functions of the step.

python -m ... FOLDER FIRST LAST HOW [SETTING=JSON ...] takes steps FIRST to LAST in a process of its own, which ends
with a finish event, by an `error` without one, or by a `kill`. With
cut=[PID, FILE] it kills that process halfway, once the file has been written.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.dashboards import wandb_run
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import (
    CheckpointEvent,
    DecisionEvent,
    EvaluationEvent,
    FinishEvent,
    SelectedUnit,
)
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter
from gnmr_megatron.observability.trackers import make_trackers
from tests.unit.observability.test_events import start_event, step_event

UNITS = UnitTable(
    Unit(layer, 0, f"decoder.layers.{layer}.mlp.linear_fc1", (8, 4)) for layer in range(2)
)
CONFIG = {"seed": 7, "gnmr": {"alpha": 3.0}}


def loss(step):
    return 10.0 / step


def gnmr(step):
    """[units]; the second unit's is infinite at each fifth step."""
    return np.array([1.0 + step / 64, math.inf if step % 5 == 0 else 0.5])


def selected(step):
    return [1] if step > 0 and step % 5 == 0 else []


def events(step, matrix):
    """The record of a step, then its events, as the recorder writes them."""
    recovered = selected(step - 1)
    matrix.append(
        step=step,
        updated=True,
        global_norm=1.0,
        norms=np.ones(2),
        gnmr=gnmr(step),
        delta_gnmr=gnmr(step) / 2,
        recovered=np.array(recovered, dtype=np.int64),
        selected=np.array(selected(step), dtype=np.int64),
    )
    yield step_event(step, loss=loss(step), recovered=[UNITS.ids[index] for index in recovered])
    for index in selected(step):
        unit = SelectedUnit(
            unit=UNITS.ids[index],
            gnmr=math.inf,
            delta_gnmr=1.5,
            score=math.inf,
            lock=5,
            reason="risky",
        )
        yield DecisionEvent(step=step, selected=[unit])


def end(folder, step):
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "shard.bin").write_bytes(b"1234")
    yield EvaluationEvent(step=step, loss=1.5, perplexity=4.5, tokens=10, seconds=1.0)
    yield CheckpointEvent(step=step, path=str(checkpoint), seconds=0.1, bytes=4, kind="final")
    yield FinishEvent(step=step, reason="completed", loss=1.5, seconds=1.0, tokens=10)


def write_report(folders, output):
    """Stands for the report's page, of which it has the number of events."""
    count = [len((folder / "events.jsonl").read_text().splitlines()) for folder in folders]
    output.write_text(f"<html>{count}</html>")
    return output


def cut_network(process, state, *, since):
    """End a W&B server that has taken up this run."""
    while not Path(state).exists() or Path(state).stat().st_mtime < since:
        time.sleep(0.1)
    time.sleep(1)
    os.kill(process, signal.SIGKILL)


def track(folder, first, last, *, how="finish", cut=None, **settings):
    began = time.time()
    folder.mkdir(exist_ok=True)
    log = EventLog.resume(folder, first - 1)
    matrix = RiskMatrixWriter.resume(folder, UNITS, first - 1)
    config = TrackingConfig(**{"console": "quiet", "wandb_mode": "disabled", **settings})
    trackers = make_trackers(folder, config, run_config=CONFIG, write_report=write_report)

    def tell(event):
        log.append(event)
        trackers.record(event)

    tell(start_event(first, total_steps=last))
    for step in range(first, last + 1):
        for event in events(step, matrix):
            tell(event)
        if cut is not None and step == (first + last) // 2:
            cut_network(*cut, since=began)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "finish":
        for event in end(folder, last):
            tell(event)
    trackers.close()
    log.close()
    matrix.close()


if __name__ == "__main__":
    wandb_run.FINISH_SECONDS = 2.0
    given = {key: json.loads(value) for key, value in (item.split("=") for item in sys.argv[5:])}
    wandb_run.INIT_SECONDS = given.pop("init_seconds", 60.0)
    place, begin, stop, ending = sys.argv[1:5]
    track(Path(place), int(begin), int(stop), how=ending, **given)
