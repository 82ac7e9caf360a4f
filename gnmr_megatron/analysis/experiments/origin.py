"""What a run of a suite follows from, so that a result is never taken for that of another suite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gnmr_megatron.analysis.experiments.planned_run import PlannedRun
from gnmr_megatron.errors import ConfigError, DataError

MANIFEST = "manifest.json"
"""File of a prepared dataset, which is whole where that is there."""

SHOWN_KEYS = 5


def origins_of(runs: Sequence[PlannedRun]) -> dict[Path, dict[str, Any]]:
    """What each run follows from, by its folder: a flat mapping of JSON's types.

    That is its settings, those of its base file, what its arm takes from other runs, these in turn, and its datasets.

    Args:
        runs: all of a suite, whose datasets are made.

    Raises:
        ConfigError: a base file cannot be read.
        DataError: a dataset is not there.
    """
    by_folder = {run.folder: run for run in runs}
    found: dict[Path, dict[str, Any]] = {}

    def origin(folder: Path) -> dict[str, Any]:
        if folder not in found:
            run = by_folder[folder]
            needed = {f"run {item.name}": _digest(origin(item)) for item in run.needs}
            # as it reads from a file, where all keys are text
            found[folder] = json.loads(json.dumps(_own_origin(run) | needed, default=str))
        return found[folder]

    return {run.folder: origin(run.folder) for run in runs}


def origin_as_comment(origin: Mapping[str, Any]) -> str:
    """First line of a sidecar, that `check_origin` reads."""
    return f"# {json.dumps(origin, sort_keys=True)}\n"


def check_origin(run: PlannedRun, origin: Mapping[str, Any]) -> None:
    """Check that a run that was started before follows from the same.

    Raises:
        ConfigError: it does not; names what differs.
    """
    try:
        head = run.sidecar.read_text().partition("\n")[0].removeprefix("# ")
    except OSError:
        if run.folder.exists():
            raise ConfigError(
                f"{run.folder}: was not started by this suite ({run.sidecar} is missing); remove it, or give another "
                "--output"
            ) from None
        return
    try:
        before = json.loads(head)
    except json.JSONDecodeError:
        before = {}
    missing = object()
    differing = [
        key
        for key in sorted(before.keys() | origin.keys())
        if before.get(key, missing) != origin.get(key, missing)
    ]
    if differing:
        shown = ", ".join(differing[:SHOWN_KEYS]) + (", ..." if differing[SHOWN_KEYS:] else "")
        raise ConfigError(
            f"{run.folder}: was started with other settings ({shown}; see {run.sidecar}); remove both, or give another "
            "--output"
        )


def _own_origin(run: PlannedRun) -> dict[str, Any]:
    arm = run.arm
    origin: dict[str, Any] = {**_base_settings(run.base), **run.settings}
    if arm.budget_of is not None:
        origin["budget_of"] = arm.budget_of
    if arm.calibrated_on is not None:
        origin |= {
            "calibrated_on": arm.calibrated_on,
            "target_exceedance": arm.target_exceedance,
        }
    for name, text in run.datasets.items():
        origin[f"text of {name}"] = [list(text.inputs), text.tokenizer_from]
    read = run.placed_settings.get("data.datasets", origin.get("data.datasets"))
    if isinstance(read, list):
        origin["content of data.datasets"] = [_manifest_digest(Path(str(item))) for item in read]
    return origin


def _manifest_digest(folder: Path) -> str:
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"{folder}: is no prepared dataset ({error.strerror}); see gnmr-megatron prepare-data"
        ) from error


def _base_settings(path: Path) -> dict[str, Any]:
    """Dotted keys of a configuration file, whose sections may be files of their own."""
    settings: dict[str, Any] = {}
    for name, value in _mapping(path).items():
        is_file = isinstance(value, str) and value.endswith((".yaml", ".yml"))
        section = _mapping(path.parent / value) if is_file else value
        if isinstance(section, dict):
            settings |= {f"{name}.{key}": item for key, item in section.items()}
        else:
            settings[name] = section
    return settings


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    return content if isinstance(content, dict) else {}


def _digest(origin: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()
