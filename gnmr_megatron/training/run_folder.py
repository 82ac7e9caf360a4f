"""Which folder a run writes to, and which checkpoints it may go on from."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gnmr_megatron.errors import CheckpointError
from gnmr_megatron.training.checkpoint_files import (
    DESCRIPTION,
    FOLDER,
    complete_checkpoints,
    split_resume,
)

TAKEN_UP = "taken_up.json"


@dataclass(frozen=True)
class Job:
    """What lives through the restarts of a run.

    Attributes:
        launch: name of the launch by torchrun, which starts all ranks again after a failure.
        slurm_job: id of the Slurm job, or None; a job that is queued again is launched anew.
        is_requeued: whether Slurm had started the job before.
    """

    launch: str
    slurm_job: str | None = None
    is_requeued: bool = False

    @classmethod
    def of(cls, launch: str) -> Job:
        """The job of this process; Slurm's part comes from the environment."""
        return cls(
            launch,
            os.environ.get("SLURM_JOB_ID"),
            int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0,
        )

    def has_taken_up(self, checkpoint: Path) -> bool:
        """Whether this job went on from the checkpoint before it was restarted."""
        try:
            mark = json.loads((checkpoint.parent / TAKEN_UP).read_text())
            earlier = Job(mark["launch"], mark["slurm_job"])
            name = mark["checkpoint"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        is_same = earlier.launch == self.launch or (
            self.is_requeued and earlier.slurm_job == self.slurm_job
        )
        return bool(is_same and name == checkpoint.name)

    def note_taken_up(self, checkpoint: Path) -> None:
        """Remember that this job goes on from the checkpoint."""
        mark = {"checkpoint": checkpoint.name, **dataclasses.asdict(self)}
        (checkpoint.parent / TAKEN_UP).write_text(json.dumps(mark) + "\n")


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


def choose_run_folder(
    runs_dir: Path, name: str, resume: str | None, *, job: Job | None = None
) -> RunFolder:
    """Pick the folder to go on with, or make a new one: `name`, or `name-2`, `name-3`, ... where that exists.

    Args:
        runs_dir: folder of all runs.
        name: name of the run.
        resume: a run folder, a checkpoint in one, `latest`, `auto`, or None for a new run. `auto` is for restarts
            that nobody watches: the newest run of the name goes on from its newest whole checkpoint, or from its
            beginning, and where there is no such run a new one starts.
        job: a checkpoint that `resume` names is taken up once in a job; its restarts go on from the newest one.

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
    if checkpoint is not None and job is not None and job.has_taken_up(checkpoint):
        return RunFolder(path, is_resumed=True, candidates=complete)
    candidates = complete[:1] if checkpoint is None else tuple({checkpoint} & set(complete))
    if not candidates and (path / DESCRIPTION).exists():
        raise CheckpointError(
            f"resume: {resume} holds weights only; start a new run from it with --init_from {resume}"
        )
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
