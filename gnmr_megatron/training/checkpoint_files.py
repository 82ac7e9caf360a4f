"""Checkpoints as files: which are complete, whether they are whole, which may go. No torch.

A save writes to `step_N.partial` and takes the name `step_N` at its end. Whatever is to go loses that name first, so a
folder with it is complete at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnmr_megatron.errors import CheckpointError

FOLDER = "checkpoints"
DESCRIPTION = "checkpoint.json"
PARTIAL = ".partial"
SUPERSEDED = ".superseded"
SCHEMA_VERSION = 2
_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder, or None where the name is none of a complete one."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a `checkpoints` folder, oldest step first."""
    found = [(step_of(path), path) for path in folder.glob("step_*")]
    steps = [
        (step, path) for step, path in found if step is not None and (path / DESCRIPTION).exists()
    ]
    return [path for _, path in sorted(steps)]


def split_resume(resume: Path) -> tuple[Path, Path | None]:
    """The run folder that `resume` means, and the checkpoint in it where it names one."""
    if step_of(resume) is not None and resume.parent.name == FOLDER:
        return resume.parent.parent, resume
    return resume, None


@dataclass(frozen=True)
class WrittenFile:
    """Size in bytes and SHA-256 of a file of a checkpoint."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> WrittenFile:
        """Read a file and add it up."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.stat().st_size, digest)


@dataclass(frozen=True)
class CheckpointDescription:
    """What `checkpoint.json` says of the checkpoint that it lies in.

    Attributes:
        step: steps done.
        layout: parallel sizes and the number of processes that saved it.
        identity: what has to be equal on resume, by dotted key.
        optimizer: which kind of optimizer state it holds.
        state: counters, learning-rate schedule and controller, in plain values.
        files: every other file by name.
    """

    step: int
    layout: Mapping[str, Any]
    identity: Mapping[str, Any]
    optimizer: str
    state: Mapping[str, Any]
    files: Mapping[str, WrittenFile]

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(file.bytes for file in self.files.values())

    def write(self, folder: Path) -> None:
        """Write it, and bring all of it to the disk."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "layout": self.layout,
            "identity": self.identity,
            "optimizer": self.optimizer,
            "state": self.state,
            "files": {name: vars(file) for name, file in sorted(self.files.items())},
        }
        with (folder / DESCRIPTION).open("w") as file:
            json.dump({"sha256": _digest(content), **content}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> CheckpointDescription:
        """The description of a complete checkpoint.

        Raises:
            CheckpointError: it is missing, damaged, or of another version.
        """
        try:
            content = json.loads((path / DESCRIPTION).read_text())
            digest = content.pop("sha256")
            schema = content.pop("schema_version")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: is no complete checkpoint ({error}); choose another one"
            ) from error
        if schema != SCHEMA_VERSION:
            raise CheckpointError(
                f"{path / DESCRIPTION}: has schema {schema}, this version reads {SCHEMA_VERSION}"
            )
        if digest != _digest({"schema_version": schema, **content}):
            raise CheckpointError(
                f"{path / DESCRIPTION}: is damaged, its content has another checksum"
            )
        files = {name: WrittenFile(**file) for name, file in content.pop("files").items()}
        return cls(**content, files=files)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damages(
    path: Path, description: CheckpointDescription, *, part: int = 0, parts: int = 1
) -> Iterator[str]:
    """One line for each file that is missing or not as it was written.

    Args:
        path: folder of the checkpoint.
        description: from its `checkpoint.json`.
        part: which of `parts` shares of the files to read.
        parts: readers that share the work.
    """
    for name in sorted(description.files)[part::parts]:
        expected = description.files[name]
        try:
            size = (path / name).stat().st_size
            if size != expected.bytes:
                yield f"{path / name}: has {size:,} bytes, but {expected.bytes:,} were written"
            elif WrittenFile.of(path / name) != expected:
                yield f"{path / name}: is damaged, its content has another checksum"
        except OSError as error:
            yield f"{path / name}: cannot be read ({error.strerror})"


def verify(path: Path) -> list[str]:
    """One line for each damage of a checkpoint; none where it is whole."""
    try:
        return list(damages(path, CheckpointDescription.read(path)))
    except CheckpointError as error:
        return [str(error)]


def newest_good(paths: Sequence[Path]) -> Path | None:
    """The last of the checkpoints, oldest first, that is whole; reads those that it looks at."""
    return next((path for path in reversed(paths) if not verify(path)), None)


def expendable(
    paths: Sequence[Path], *, keep_last: int | None, keep_every: int | None
) -> list[Path]:
    """Which checkpoints may go: all but the newest `keep_last` and those of every `keep_every`-th step.

    Args:
        paths: complete checkpoints, oldest first.
        keep_last: newest ones to keep; None keeps all.
        keep_every: keep each whose step is a multiple of it, whatever its age.
    """
    if keep_last is None:
        return []
    old = paths[: max(0, len(paths) - keep_last)]
    return [path for path in old if not (keep_every and (step_of(path) or 0) % keep_every == 0)]


def remove(path: Path) -> None:
    """Remove a checkpoint so that no half of it ever has its name."""
    if not path.name.endswith((PARTIAL, SUPERSEDED)):
        path = _renamed(path, PARTIAL)
    shutil.rmtree(path)


def put_aside(folder: Path, *, after_step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that goes on from `after_step` takes again."""
    later = [path for path in complete_checkpoints(folder) if (step_of(path) or 0) > after_step]
    return [_renamed(path, SUPERSEDED) for path in later]


def leftovers(folder: Path, *suffixes: str) -> list[Path]:
    """Folders of interrupted saves, and of checkpoints that were put aside."""
    return sorted(path for suffix in suffixes for path in folder.glob(f"step_*{suffix}"))


def publish(partial: Path, path: Path) -> None:
    """Give a checkpoint that is written its name, in place of an older one of the same step."""
    if path.exists():
        shutil.rmtree(_renamed(path, SUPERSEDED))
    partial.rename(path)
    _sync_folders((path, path.parent))


def _renamed(path: Path, suffix: str) -> Path:
    target = path.with_name(path.name + suffix)
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


def _sync_folders(folders: Iterable[Path]) -> None:
    """Bring the names in the folders to the disk."""
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
