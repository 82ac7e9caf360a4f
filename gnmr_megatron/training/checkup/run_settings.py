"""The run itself: settings, data, and the folders that it reads and writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gnmr_megatron.errors import GnmrError
from gnmr_megatron.training.checkup.findings import RUN, Finding
from gnmr_megatron.training.checkup.imports import describe, import_problem
from gnmr_megatron.training.checkup.resources import existing_parent
from gnmr_megatron.training.config import RunConfig, validate
from gnmr_megatron.training.run_folder import choose_run_folder

_OWN_BITS, _OTHERS_MAY_WRITE = 0o700, 0o002


@dataclass(frozen=True)
class CheckedData:
    """What was found of the datasets.

    Attributes:
        findings: about them.
        vocab_size: of the tokenizer; None where the data cannot be read.
    """

    findings: tuple[Finding, ...]
    vocab_size: int | None


def check_data(config: RunConfig) -> CheckedData:
    """Whether all datasets are whole, readable and made with their tokenizer."""
    problem = import_problem("gnmr_megatron.data.manifest")
    if problem is not None:
        finding = RUN.problem("data", f"cannot be looked at: {problem}", "see the versions")
        return CheckedData((finding,), None)
    from gnmr_megatron.data.manifest import describe_datasets
    from gnmr_megatron.training.launch_check import data_hash

    try:
        data = describe_datasets(config.data)
        for prefix in data.prefixes:
            data_hash(prefix)
            _check_tokenizer(prefix.parent)
    except GnmrError as error:
        finding = RUN.refused("data", str(error))
        return CheckedData((finding,), None)
    except OSError as error:
        detail = f"{error.filename}: cannot be read ({error.strerror})"
        finding = RUN.problem("data", detail, "give this user the right to read it")
        return CheckedData((finding,), None)
    names = ", ".join(map(str, data.prefixes))
    found = RUN.ok("data", f"{names}: readable, vocabulary of {data.vocab_size:,}")
    return CheckedData((found, _data_folder(data.prefixes[0].parent)), data.vocab_size)


def check_settings(
    config: RunConfig, *, world_size: int, vocab_size: int | None
) -> Iterator[Finding]:
    """Whether the settings fit each other, the number of processes, the data and the engine."""
    lines = []
    try:
        # without data, a vocabulary that fits any layout
        fitting = config.parallel.tensor_model_parallel_size * config.model.vocab_padding_multiple
        validate(config, world_size=world_size, vocab_size=vocab_size or fitting)
        lines = list(_engine_problems(config))
    except GnmrError as error:
        lines = str(error).splitlines()
    for line in lines:
        yield RUN.refused("settings", line)
    if not lines:
        yield RUN.ok("settings", f"fit each other and {world_size} processes")


def check_folders(config: RunConfig) -> Iterator[Finding]:
    """Whether the run folder can be written, and what is to be resumed is there."""
    yield writable(
        "runs_dir",
        Path(config.runs_dir),
        "take another runs_dir, or give this user the right to write",
    )
    yield umask(_current_umask())
    if config.resume in (None, "auto"):  # either may start a new run
        yield RUN.not_applicable("resume", "a new run, or whatever is there")
        return
    try:
        folder = choose_run_folder(Path(config.runs_dir), config.name, config.resume)
    except GnmrError as error:
        yield RUN.refused("resume", str(error))
    else:
        yield RUN.ok("resume", f"goes on from {folder.candidates[0]}")


def writable(check: str, folder: Path, advice: str) -> Finding:
    """Whether files can be made in a folder, or where it will be made; by making one that has no name."""
    place = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return RUN.problem(check, f"{place}: cannot be written ({error.strerror})", advice)
    return RUN.ok(check, f"{folder}: can be written")


def umask(mask: int) -> Finding:
    """What permissions new files lack."""
    detail = f"{mask:04o}"
    if mask & _OWN_BITS:
        return RUN.problem(
            "umask", f"{detail}: new files could not be used by their owner", "umask 022"
        )
    if not mask & _OTHERS_MAY_WRITE:
        return RUN.warning("umask", f"{detail}: everybody could write the run's files", "umask 022")
    return RUN.ok("umask", detail)


def _data_folder(folder: Path) -> Finding:
    """The order of samples is written beside the first dataset, unless it is there from an earlier run."""
    from gnmr_megatron.data.manifest import CACHE

    cache = folder / CACHE
    found = writable(
        "data folder", cache, "give this user the right to write there, or copy the data"
    )
    if found.status == "problem" and cache.is_dir():
        detail = f"{found.detail}; only an order of samples that is there already can be used"
        return RUN.warning("data folder", detail, found.advice)
    return found


def _check_tokenizer(folder: Path) -> None:
    """The tokenizer of a prepared dataset has to be the one that it was prepared with."""
    from gnmr_megatron.data.manifest import MANIFEST, read_manifest
    from gnmr_megatron.data.tokenizer import file_hash
    from gnmr_megatron.errors import DataError

    if not (folder / MANIFEST).exists():
        return
    manifest = read_manifest(folder)
    if file_hash(folder / manifest.tokenizer) != manifest.tokenizer_fingerprint:
        raise DataError(
            f"{folder / manifest.tokenizer}: is not the tokenizer that {folder} was prepared with; prepare it again"
        )


def _engine_problems(config: RunConfig) -> Iterator[str]:
    """What the engine refuses of the settings."""
    if import_problem("torch") is not None or import_problem("megatron.core") is not None:
        return  # told among the versions
    from gnmr_megatron.training.setup import checked_engine

    try:
        checked_engine(config, config.unit_plans())
    except GnmrError as error:
        yield from str(error).splitlines()
    except (AssertionError, ValueError) as error:
        yield f"megatron-core refuses them: {describe(error)}"


def _current_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
