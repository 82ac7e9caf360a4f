import dataclasses
from pathlib import Path

import pytest

from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.event_log import EventLog
from gnmr_megatron.observability.events import FaultEvent, StartEvent


def start(step: int, control: ControlConfig | None) -> StartEvent:
    return StartEvent(
        step=step,
        run="r",
        resumed_from=None,
        world_size=1,
        layout={},
        num_units=1,
        max_recovered=1,
        total_steps=9,
        policy="gnmr",
        mode="active",
        environment={},
        control=None if control is None else dataclasses.asdict(control),
    )


def fault(step: int, kind: str) -> FaultEvent:
    return FaultEvent(step=step, kind=kind, rank=None, units=[], message="")


def test_each_attempt_that_took_a_step_has_its_settings(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    first, second = ControlConfig(alpha={0: 2.0, 5: 4.0}), ControlConfig(beta=1.5)
    for event in (
        start(1, first),
        start(4, first),  # took no step
        start(4, second),
        fault(3, "restart"),
        start(8, second),
        fault(7, "history_restart"),
    ):
        log.append(event)
    log.close()

    found = RecordedRun(tmp_path).segments

    assert [segment.first_step for segment in found] == [1, 4, 8]
    assert [segment.config for segment in found] == [first, second, second]
    assert [segment.restarts_history for segment in found] == [False, False, True]


def test_a_log_without_settings_takes_those_of_the_configuration(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.append(start(1, None))
    log.close()
    (tmp_path / "config.yaml").write_text("gnmr: {alpha: 7.0}\n")

    assert RecordedRun(tmp_path).segments[0].config == ControlConfig(alpha=7.0)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no run folder, it has no events\.jsonl"):
        RecordedRun(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": "start", "st')
    with pytest.raises(DataError, match="has no start event yet"):
        RecordedRun(tmp_path)
