"""Which folder a run writes to, and which checkpoints it may go on from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.training.checkpoint_files import FOLDER, complete_checkpoints, split_resume


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: the folder.
        is_resumed: whether the run goes on with what is in it.
        candidates: checkpoints to go on from, the first that is whole; where there is none, from the beginning.
    """

    path: Path
    is_resumed: bool
    candidates: tuple[Path, ...] = ()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / FOLDER


def choose_run_folder(runs_dir: Path, name: str, resume: str | None) -> RunFolder:
    """Pick the folder to go on with, or make a new one: `name`, or `name-2`, `name-3`, ... where that exists.

    Args:
        runs_dir: folder of all runs.
        name: name of the run.
        resume: a run folder, a checkpoint in one, `latest`, `auto`, or None for a new run. `auto` is for restarts
            that nobody watches: the newest run of the name goes on from its newest whole checkpoint, or from its
            beginning, and where there is no such run a new one starts.

    Raises:
        CheckpointError: there is nothing to resume.
    """
    if resume is None:
        return RunFolder(_make_new(runs_dir, name), is_resumed=False)
    if resume == "auto":
        earlier = _earlier_runs(runs_dir, name)
        if not earlier:
            return RunFolder(_make_new(runs_dir, name), is_resumed=False)
        return RunFolder(earlier[-1], is_resumed=True, candidates=_newest_first(earlier[-1]))
    if resume == "latest":
        earlier = [path for path in _earlier_runs(runs_dir, name) if _newest_first(path)]
        if not earlier:
            raise CheckpointError(
                f"resume: no run of the name '{name}' in {runs_dir} has a checkpoint; "
                "start without --resume, or name a run folder"
            )
        return RunFolder(earlier[-1], is_resumed=True, candidates=_newest_first(earlier[-1])[:1])
    path, checkpoint = split_resume(Path(resume))
    complete = _newest_first(path)
    candidates = complete[:1] if checkpoint is None else tuple({checkpoint} & set(complete))
    if not candidates:
        raise CheckpointError(
            f"resume: {resume} holds no complete checkpoint; name another run folder"
        )
    return RunFolder(path, is_resumed=True, candidates=candidates)


def _newest_first(path: Path) -> tuple[Path, ...]:
    return tuple(reversed(complete_checkpoints(path / FOLDER)))


def _make_new(runs_dir: Path, name: str) -> Path:
    number = 1
    while True:
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def _earlier_runs(runs_dir: Path, name: str) -> list[Path]:
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    matches = [(pattern.fullmatch(path.name), path) for path in runs_dir.glob(f"{name}*")]
    return [
        path for _, path in sorted((int(match[1] or 1), path) for match, path in matches if match)
    ]
