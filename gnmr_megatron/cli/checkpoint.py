"""`gnmr-megatron checkpoint`: list, verify and prune the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.training.checkpoint_files import (
    DESCRIPTION,
    FOLDER,
    PARTIAL,
    SUPERSEDED,
    CheckpointDescription,
    complete_checkpoints,
    expendable,
    leftovers,
    remove,
    split_resume,
    step_of,
    verify,
)

DESCRIPTIONS = {
    "ls": "List the complete checkpoints of a run, with step, size, and the layout that saved them.",
    "verify": "Compare every file of the checkpoints with its checksum. Exits with 1 where one is damaged.",
    "prune": "Remove old checkpoints, those of steps that a resume took again, and what interrupted saves left. "
    "Not for a run that is saving at this moment.",
}


def run(arguments: Sequence[str]) -> int:
    """List, verify or prune."""
    options = _parser().parse_args(arguments)
    run_folder, single = split_resume(options.run)
    if not run_folder.is_dir():
        raise ConfigError(f"{run_folder}: is no run folder")
    paths = complete_checkpoints(run_folder / FOLDER)
    if single is not None:
        paths = [path for path in paths if path == single]
    elif (run_folder / DESCRIPTION).exists():  # what `convert` wrote
        paths = [run_folder]
    return int({"ls": _list, "verify": _verify, "prune": _prune}[options.verb](paths, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron checkpoint",
        description="List, verify and prune the checkpoints of a run. Works on its files alone.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="ls | verify | prune")
    for verb, description in DESCRIPTIONS.items():
        sub = verbs.add_parser(verb, help=description, description=description)
        sub.add_argument("run", type=Path, help="run folder, such as runs/quickstart")
        sub.add_argument("--json", action="store_true", help="print one JSON object instead")
        if verb == "prune":
            sub.add_argument(
                "--keep-last", type=int, required=True, metavar="N", help="keep the newest N"
            )
            sub.add_argument(
                "--keep-every",
                type=int,
                metavar="M",
                help="keep each whose step is a multiple of M",
            )
            sub.add_argument("--dry-run", action="store_true", help="only tell what would go")
    return parser


def _list(paths: Sequence[Path], options: argparse.Namespace) -> int:
    rows = [_row(path) for path in paths]
    if options.json:
        print(json.dumps({"checkpoints": rows}))
        return 0
    table = Table(box=SIMPLE_HEAD)
    for column in ("step", "MB", "files", "saved by", "folder"):
        table.add_column(column, justify="right" if column in ("step", "MB", "files") else "left")
    for row in rows:
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.1f}"
        table.add_row(str(row["step"]), size, str(row["files"] or ""), row["saved_by"], row["path"])
    Console(width=max(100, shutil.get_terminal_size().columns)).print(table)
    return 0


def _row(path: Path) -> dict[str, Any]:
    row = {"step": step_of(path), "path": str(path)}
    try:
        description = CheckpointDescription.read(path)
    except CheckpointError as error:
        return {**row, "bytes": None, "files": None, "saved_by": str(error)}
    layout = description.layout
    sizes = {
        "TP": layout["tensor_model_parallel_size"],
        "PP": layout["pipeline_model_parallel_size"],
        "CP": layout["context_parallel_size"],
    }
    model_parallel = " x ".join(
        f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "CP"
    )
    return {
        **row,
        "step": description.step,
        "bytes": description.num_bytes,
        "files": len(description.files),
        "saved_by": f"{layout['world_size']} processes ({model_parallel})",
    }


def _verify(paths: Sequence[Path], options: argparse.Namespace) -> int:
    found = {str(path): verify(path) for path in paths}
    if options.json:
        print(json.dumps({"damages": found}))
    else:
        for path, damages in found.items():
            print("\n".join(damages) if damages else f"{path}: whole")
        if not found:
            print("no complete checkpoint")
    return int(any(found.values()))


def _prune(paths: Sequence[Path], options: argparse.Namespace) -> int:
    for option in ("keep_last", "keep_every"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')}: {value} must be at least 1")
    folder = split_resume(options.run)[0] / FOLDER
    going = [
        *leftovers(folder, PARTIAL, SUPERSEDED),
        *expendable(paths, keep_last=options.keep_last, keep_every=options.keep_every),
    ]
    if not options.dry_run:
        for path in going:
            remove(path)
    if options.json:
        print(json.dumps({"removed": [str(path) for path in going], "dry_run": options.dry_run}))
    else:
        for path in going:
            print(f"{'would remove' if options.dry_run else 'removed'} {path}")
        if not going:
            print("nothing to remove")
    return 0
