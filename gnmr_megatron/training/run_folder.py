"""Which folder a run writes to, and where it resumes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gnmr_megatron.errors import CheckpointError


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: the folder.
        is_resumed: whether the run goes on with what is in it.
    """

    path: Path
    is_resumed: bool

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"


def choose_run_folder(runs_dir: Path, name: str, resume: str | None) -> RunFolder:
    """Pick the folder to go on with, or make a new one: `name`, or `name-2`, `name-3`, ... where that exists.

    Args:
        runs_dir: folder of all runs.
        name: name of the run.
        resume: a run folder, `latest`, `auto` (latest, or a new run if there is none), or None for a new run.

    Raises:
        CheckpointError: there is nothing to resume.
    """
    if resume in ("latest", "auto"):
        earlier = [path for path in _earlier_runs(runs_dir, name) if _has_checkpoint(path)]
        if earlier:
            return RunFolder(earlier[-1], is_resumed=True)
        if resume == "latest":
            raise CheckpointError(
                f"resume: no run of the name '{name}' in {runs_dir} has a checkpoint; "
                "start without --resume, or name a run folder"
            )
    elif resume is not None:
        path = Path(resume)
        if not _has_checkpoint(path):
            raise CheckpointError(
                f"resume: {path} holds no complete checkpoint; name another run folder"
            )
        return RunFolder(path, is_resumed=True)
    return RunFolder(_make_new(runs_dir, name), is_resumed=False)


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


def _has_checkpoint(path: Path) -> bool:
    return any((path / "checkpoints").glob("step_*/checkpoint.json"))
