"""The W&B run of a run folder: opened online or offline, closed in bounded time."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gnmr_megatron.observability.append_file import replace_file
from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.observability.dashboards.wandb_file import logged_steps

if TYPE_CHECKING:
    import wandb

TABLE = "control/recovery_set"
RUN_ID = "wandb_run_id"
INIT_SECONDS = 30.0
FINISH_SECONDS = 60.0  # without a network W&B would wait for ever; `wandb sync` sends the rest
CLOSE_SECONDS = 150.0  # all of the end: each last table may wait 20 s for an answer, too


@dataclass(frozen=True)
class Progress:
    """The last step that W&B has, and the last one whose row has a part of the table."""

    step: int
    table_step: int


def open_run(folder: Path, config: TrackingConfig, run_config: Mapping[str, Any]) -> wandb.Run:
    """Start the W&B run of a folder, or go on with it; offline, with a line to say so, where W&B doesn't answer."""
    import wandb

    _silence()
    if config.wandb_mode == "online":
        try:
            return _init(folder, config, run_config, mode="online")
        except Exception as error:  # noqa: BLE001 - whatever it is, offline does without
            why = " ".join(f"{type(error).__name__}: {error}".split())
            say(
                f"W&B cannot be used online ({why}); the run is written offline: "
                f"wandb sync {folder}/wandb/offline-run-*"
            )
            wandb.teardown()  # else the id counts as taken
            _silence()
    return _init(folder, config, run_config, mode="offline")


def close_run(run: wandb.Run) -> None:
    """End the W&B run; what could not be sent in time stays on the disk, with a line to say so."""
    import wandb

    try:
        run.finish()
    except TimeoutError:
        say(
            f"W&B did not take everything within {FINISH_SECONDS:.0f} s of the end; "
            f"to send the rest: wandb sync --include-online {Path(run.dir).parent}"
        )
    wandb.teardown()  # finish() doesn't wait for W&B's own process, which writes the offline file


def progress(run: wandb.Run, folder: Path) -> Progress | None:
    """How far a W&B run is that goes on: online as W&B says, offline as its files do.

    Returns:
        None where that isn't known: a new run, or one whose files are gone, as after `wandb sync` and `wandb clean`.
    """
    parts = (folder / "wandb").glob(f"*run-*-{run.id}/run-{run.id}.wandb")
    earlier = [part for part in parts if part.parent != Path(run.dir).parent]
    steps = [logged_steps(part, TABLE) for part in earlier]
    if run.offline:
        last = max((step for step, _ in steps), default=None)
    else:
        last = run.starting_step - 1 if run.resumed else None
    if last is None:
        return None
    tables = [step for _, with_table in steps for step in with_table if step <= last]
    return Progress(step=last, table_step=max(tables, default=0 if steps else last))


def _init(
    folder: Path,
    config: TrackingConfig,
    run_config: Mapping[str, Any],
    *,
    mode: Literal["online", "offline"],
) -> wandb.Run:
    import wandb

    run = wandb.init(
        mode=mode,
        dir=str(folder),
        project=config.wandb_project,
        entity=config.wandb_entity,
        name=config.wandb_name or folder.name,
        id=_run_id(folder),
        resume="allow" if mode == "online" else None,
        tags=config.wandb_tags,
        config=dict(run_config),
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            login_timeout=3,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )
    run.define_metric("eval/loss", summary="min,last")
    return run


def _run_id(folder: Path) -> str:
    """The W&B id of the run folder, made once and kept there."""
    path = folder / RUN_ID
    if not path.exists():
        replace_file(path, f"{uuid.uuid4().hex[:8]}\n".encode())
    return path.read_text().strip()


def _silence() -> None:
    """Before anything else: W&B asks for a key where it has none, and waits for the answer."""
    import wandb

    wandb.setup(wandb.Settings(silent=True))


def say(line: str) -> None:
    """A line to the user, where the tracker goes on."""
    sys.stderr.write(f"{line}\n")
