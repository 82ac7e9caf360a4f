"""Where a run goes on: its folder, the checkpoint that it takes up, and the state in it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from gnmr_megatron.control.controller import Controller, DecidesRecovery
from gnmr_megatron.distributed.process_groups import gather_from_all, launch_id
from gnmr_megatron.errors import CheckpointError, ConfigError, GnmrError
from gnmr_megatron.training.checkpoint import Checkpointer
from gnmr_megatron.training.checkpoint_files import (
    PARTIAL,
    leftovers,
    put_aside,
    remove,
    split_resume,
)
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.config_files import write_config
from gnmr_megatron.training.run_folder import Job, RunFolder, choose_run_folder
from gnmr_megatron.training.state import TrainState

SETTINGS = "config.yaml"


def agree_on_folder(config: RunConfig) -> RunFolder:
    """Rank 0 picks the run folder; in a new one it writes the settings, before anything else happens there."""
    choice: RunFolder | Exception | None = None
    if dist.get_rank() == 0:
        try:
            job = Job.of(launch_id())
            choice = choose_run_folder(Path(config.runs_dir), config.name, config.resume, job=job)
            if not choice.is_resumed:
                write_config(config, choice.path / SETTINGS)
        except (OSError, GnmrError) as error:  # others wait for the choice: tell them, too
            choice = error
    agreed = gather_from_all(choice)[0]
    if isinstance(agreed, OSError):
        raise ConfigError(f"runs_dir: {config.runs_dir} cannot be written: {agreed}")
    if isinstance(agreed, Exception):
        raise agreed
    assert agreed is not None
    return agreed


def resume(
    config: RunConfig,
    folder: RunFolder,
    checkpointer: Checkpointer,
    controller: DecidesRecovery,
    *,
    initial: Path | None,
) -> tuple[TrainState, list[tuple[str, str]]]:
    """The state to start from, and kind and message of each trouble on the way to it.

    Args:
        config: settings of the run.
        folder: of the run.
        checkpointer: loads what is taken up.
        controller: of the run; its history may have to start anew.
        initial: checkpoint whose weights a new run starts from.
    """
    path, troubles = _whole_checkpoint(folder, checkpointer)
    if path is None and initial is not None:
        checkpointer.check(initial)
        checkpointer.take_weights(initial)
    state = (
        TrainState(
            train_samples=config.train_samples, global_batch_size=config.train.global_batch_size
        )
        if path is None
        else _load_state(config, path, checkpointer)
    )
    if state.global_batch_size != config.train.global_batch_size:
        if isinstance(controller, Controller):
            controller.restart_history()
        troubles.append(
            (
                "history_restart",
                "train.global_batch_size changed, so gradient norms are not comparable: history starts anew",
            )
        )
    state.global_batch_size = config.train.global_batch_size
    if folder.is_resumed:  # not before: a resume that is refused changes nothing
        _write_settings(config, folder)
    if dist.get_rank() == 0 and folder.is_resumed:
        for unfinished in leftovers(folder.checkpoints, PARTIAL):
            remove(unfinished)
        put_aside(folder.checkpoints, after_step=state.step)
        _, named = split_resume(Path(config.resume or ""))
        if named is not None and folder.candidates == (named,):
            Job.of(launch_id()).note_taken_up(named)
    return state, troubles


def _write_settings(config: RunConfig, folder: RunFolder) -> None:
    problem: str | None = None
    if dist.get_rank() == 0:
        try:
            write_config(config, folder.path / SETTINGS)
        except OSError as error:
            problem = str(error)
    problem = gather_from_all(problem)[0]
    if problem is not None:
        raise ConfigError(f"runs_dir: {folder.path} cannot be written: {problem}")


def _whole_checkpoint(
    folder: RunFolder, checkpointer: Checkpointer
) -> tuple[Path | None, list[tuple[str, str]]]:
    """The first candidate that is whole, and what was wrong with those before it.

    Raises:
        CheckpointError: there are candidates, but none is whole.
    """
    troubles = []
    for path in folder.candidates:
        try:
            checkpointer.check(path)
        except CheckpointError as error:
            if path == folder.candidates[-1]:
                raise
            troubles.append(("checkpoint_damaged", str(error)))
        else:
            return path, troubles
    return None, troubles


def _load_state(config: RunConfig, path: Path, checkpointer: Checkpointer) -> TrainState:
    state = checkpointer.load(path)
    wanted = (
        state.consumed_samples + (config.train.steps - state.step) * config.train.global_batch_size
    )
    if wanted > state.train_samples:
        raise ConfigError(
            f"train.steps: {config.train.steps} needs {wanted} training sequences, but the order of the run that "
            f"saved {path} was planned for {state.train_samples}; start such runs with data.train_samples set "
            "high enough, or lower train.steps"
        )
    return state
