"""Trackers: each shows the events of a run somewhere. A new dashboard is one file and one line in TRACKERS."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.events import Event


class Tracker(Protocol):
    """Shows events."""

    def record(self, event: Event) -> None:
        """Show an event, or pass over it."""

    def close(self) -> None:
        """Show what is left."""


class NullTracker:
    """Shows nothing: in the place of a tracker that is off."""

    def record(self, event: Event) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class TrackerGroup:
    """Several trackers as one. A tracker that fails is dropped with one line on standard error; training goes on."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = list(trackers)

    def record(self, event: Event) -> None:
        """Hand the event to every tracker that still works."""
        for tracker in tuple(self._trackers):
            try:
                tracker.record(event)
            except Exception as error:  # noqa: BLE001 - whatever a dashboard does must not stop training
                self._drop(tracker, error)

    def close(self) -> None:
        """Close every tracker that still works."""
        for tracker in tuple(self._trackers):
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._drop(tracker, error)

    def _drop(self, tracker: Tracker, error: Exception) -> None:
        self._trackers.remove(tracker)
        _warn(type(tracker).__name__, error)


ReportWriter = Callable[[Sequence[Path], Path], Path]
"""Writes the report of run folders into a file outside them, and returns its path."""

TrackerFactory = Callable[[Path, TrackingConfig, Mapping[str, Any], ReportWriter | None], Tracker]
"""Makes a tracker out of the run folder, the settings, all settings of the run and what writes its report.

It is a NullTracker where the tracker is off."""


def _console(
    folder: Path,
    config: TrackingConfig,
    run_config: Mapping[str, Any],
    write_report: ReportWriter | None,
) -> Tracker:
    from gnmr_megatron.observability.console import ConsoleTracker, JsonTracker
    from gnmr_megatron.observability.live.tracker import LiveTracker, can_draw

    if config.console == "quiet":
        return NullTracker()
    if config.console == "json":
        return JsonTracker()
    if config.console == "auto" and can_draw(sys.stdout):
        return LiveTracker(folder)
    return ConsoleTracker(log_interval=config.log_interval)


def _wandb(
    folder: Path,
    config: TrackingConfig,
    run_config: Mapping[str, Any],
    write_report: ReportWriter | None,
) -> Tracker:
    from gnmr_megatron.observability.dashboards.background import BackgroundTracker
    from gnmr_megatron.observability.dashboards.wandb_run import CLOSE_SECONDS
    from gnmr_megatron.observability.dashboards.wandb_tracker import WandbTracker

    if config.wandb_mode == "disabled":
        return NullTracker()
    tracker = WandbTracker(
        folder,
        config,
        run_config=run_config,
        write_report=write_report if config.wandb_report else None,
    )
    if config.wandb_mode == "offline":
        return tracker
    advice = f"to send the rest: wandb sync --include-online {folder}/wandb/run-*"
    return BackgroundTracker(tracker, close_seconds=CLOSE_SECONDS, advice=advice)


def _tensorboard(
    folder: Path,
    config: TrackingConfig,
    run_config: Mapping[str, Any],
    write_report: ReportWriter | None,
) -> Tracker:
    from gnmr_megatron.observability.dashboards.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker(folder, config) if config.tensorboard else NullTracker()


TRACKERS: dict[str, TrackerFactory] = {
    "console": _console,
    "wandb": _wandb,
    "tensorboard": _tensorboard,
}


def make_trackers(
    folder: Path,
    config: TrackingConfig,
    *,
    run_config: Mapping[str, Any],
    write_report: ReportWriter | None = None,
) -> TrackerGroup:
    """All trackers of TRACKERS as the settings want them; one that cannot be made is left out with one line.

    Args:
        folder: run folder.
        config: which trackers are on.
        run_config: all settings of the run.
        write_report: writes the run's report, for trackers that show it.
    """
    trackers: list[Tracker] = []
    for name, factory in TRACKERS.items():
        try:
            trackers.append(factory(folder, config, run_config, write_report))
        except Exception as error:  # noqa: BLE001 - as in TrackerGroup
            _warn(f"tracker {name}", error)
    return TrackerGroup(trackers)


def _warn(name: str, error: Exception) -> None:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    with contextlib.suppress(OSError, ValueError):  # standard error may be gone too
        sys.stderr.write(
            f"{name} failed and is off from here on ({why}); "
            "training goes on, and the run folder has everything\n"
        )
