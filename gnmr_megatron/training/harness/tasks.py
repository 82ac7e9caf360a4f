"""Tasks of the harness with data from local files: its own prompts and metrics, and no download."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.api.metrics import weighted_perplexity
from lm_eval.tasks import TaskManager

from gnmr_megatron.errors import ConfigError, DataError

PERPLEXITY = "perplexity"
FORMATS = {"jsonl": "json", "json": "json", "parquet": "parquet"}
"""Endings of data files, and the loader of each."""

_SHIPPED = Path(lm_eval.tasks.__file__).parent
_KNOWN = {"hellaswag": _SHIPPED / "hellaswag", "mmlu": _SHIPPED / "mmlu/default"}
_SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
_LOADERS = ("json", "parquet", "csv", "text", "arrow")


class LocalTasks:
    """Finds tasks by name and says where their data lie.

    Args:
        names: tasks, groups or tags, and `perplexity`.
        include_path: folder of further tasks.
        data: folder of data, `DATASET/SPLIT.jsonl` or `DATASET/SUBSET/SPLIT.jsonl`.
        num_fewshot: solved examples before each question; None leaves it to the task.
        work: folder for generated files.

    Raises:
        ConfigError: there is no task of that name.
        DataError: a file is missing.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        include_path: Path | None,
        data: Path | None,
        num_fewshot: int | None,
        work: Path,
    ) -> None:
        self._names = [name for name in names if name != PERPLEXITY]
        self._data, self._num_fewshot, self._work = data, num_fewshot, work
        self._manager = _manager(self._names, include_path)
        for leaf in self._leaves():
            self._localize(leaf)

    def load(self, documents: Sequence[str] | None) -> Any:
        """What the harness's `evaluate` takes.

        Args:
            documents: texts of `perplexity`; None leaves it out.

        Raises:
            DataError: a file is broken.
        """
        specs: list[Any] = list(self._names)
        if documents is not None:
            specs.append(_perplexity(documents, self._work))
        try:
            loaded = self._manager.load(specs)
        except Exception as error:  # whatever a loader of data or a task's own code raises
            raise DataError(f"the tasks' data cannot be loaded: {_first_line(error)}") from error
        for task in loaded["tasks"].values():
            _set_fewshot(task, self._num_fewshot)
        return loaded

    def _leaves(self) -> Iterator[str]:
        index = self._manager.task_index
        pending = list(self._names)
        while pending:
            entry = index[pending.pop(0)]
            members = sorted(entry.tags) if entry.kind.name == "TAG" else []
            if entry.kind.name == "GROUP":
                members = [_name_of(member) for member in entry.cfg["task"]]
            if entry.kind.name in ("TASK", "PY_TASK"):
                yield entry.name
            pending += members

    def _localize(self, name: str) -> None:
        """Let a task read local files where its data would be downloaded."""
        index = self._manager.task_index
        entry = index[name]
        config: Mapping[str, Any] = entry.cfg or {}
        dataset = config.get("dataset_path")
        if not dataset or dataset in _LOADERS or Path(dataset).exists():
            return
        changes = self._files_of(name, config)
        changes["dataset_kwargs"]["cache_dir"] = str(self._work / "cache")
        path = self._work / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"include": str(entry.yaml_path), "task": name, **changes}))
        index[name] = dataclasses.replace(entry, yaml_path=path)

    def _files_of(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        if self._data is None:
            raise ConfigError(f"--task-data: is needed for {name}; name the folder of its data")
        dataset, subset = config["dataset_path"], config.get("dataset_name")
        folder = self._data / Path(dataset).name
        if subset is not None:
            folder /= subset
        found: dict[str, list[str]] = {}
        for split in dict.fromkeys(_splits(config)):
            files = _data_files(folder, split)
            if files:
                found[split] = files
        needed = _needed(config, self._num_fewshot, found)
        for split in needed:
            if split not in found:
                raise DataError(
                    f"{folder}: has no {split}.jsonl, {split}.parquet or {split}-*.parquet, which {name} needs"
                    f"{_how_to_get(dataset, self._data)}"
                )
        loaders = {FORMATS[Path(file).suffix[1:]] for files in found.values() for file in files}
        if len(loaders) > 1:
            raise DataError(f"{folder}: mixes JSON and Parquet files; keep one of them")
        absent = {key: None for key in _SPLITS if config.get(key) and config[key] not in found}
        return {
            **absent,
            "dataset_path": loaders.pop(),
            "dataset_kwargs": {"data_files": found},
        }


def _manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """An index of the tasks; of the harness's thousands only where they are asked for, which takes seconds."""
    own = [] if include_path is None else [include_path]
    manager = TaskManager(include_path=[*_KNOWN.values(), *own], include_defaults=False)
    if all(name in manager.task_index for name in names):
        return manager
    manager = TaskManager(include_path=own)
    for name in names:
        if name not in manager.task_index:
            close = difflib.get_close_matches(name, [PERPLEXITY, *manager.all_tasks], n=1)
            hint = f"; did you mean `{close[0]}`?" if close else "; `lm-eval ls tasks` lists them"
            raise ConfigError(f"--tasks: lm-evaluation-harness has no task `{name}`{hint}")
    return manager


def _name_of(member: Any) -> str:
    """Name of a group's member, which may carry settings."""
    name: str = member if isinstance(member, str) else member.get("group") or member["task"]
    return name


def _splits(config: Mapping[str, Any]) -> Iterator[str]:
    for key in _SPLITS:
        if config.get(key):
            yield config[key]


def _needed(
    config: Mapping[str, Any], num_fewshot: int | None, found: Mapping[str, Any]
) -> list[str]:
    """Splits without which the task cannot run: that of the questions, and that of the solved examples."""
    needed = [config.get("test_split") or config.get("validation_split")]
    own = config.get("num_fewshot")
    if own if num_fewshot is None or own == 0 else num_fewshot:
        examples = [config.get(key) for key in ("fewshot_split", "training_split")]
        needed += [split for split in examples if split][:1]
    return [split for split in needed if split]


def _data_files(folder: Path, split: str) -> list[str]:
    """Files of a split, as Hugging Face's hub lays them out or by the split's name alone."""
    for place in (folder, folder / "data"):
        for pattern in (*(f"{split}.{ending}" for ending in FORMATS), f"{split}-*.parquet"):
            files = sorted(place.glob(pattern))
            if files:
                return [str(file) for file in files]
    return []


def _how_to_get(dataset: str, data: Path) -> str:
    if "/" not in dataset:
        return ""
    return (
        f"; where there is a network: hf download {dataset} --repo-type dataset --local-dir "
        f"{data / Path(dataset).name}"
    )


def _perplexity(documents: Sequence[str], work: Path) -> dict[str, Any]:
    """A task that scores whole documents with the harness's metrics."""
    path = work / f"{PERPLEXITY}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    metrics = {"word_perplexity": False, "byte_perplexity": False, "bits_per_byte": False}
    return {
        "task": PERPLEXITY,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": [str(path)]},
            "cache_dir": str(work / "cache"),
        },
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "num_fewshot": 0,
        "metric_list": [
            {
                "metric": name,
                "aggregation": "bits_per_byte" if name == "bits_per_byte" else _weighted_perplexity,
                "higher_is_better": higher,
            }
            for name, higher in metrics.items()
        ],
        "metadata": {"version": 1.0},
    }


def _weighted_perplexity(items: Sequence[tuple[float, float]]) -> float:
    """The harness's; infinite where it overflows, as a word's does in text without spaces."""
    try:
        return float(weighted_perplexity(items))
    except OverflowError:
        return math.inf


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """As the harness's own command line does."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=1234)


def _first_line(error: Exception) -> str:
    return next(iter(f"{type(error).__name__}: {error}".splitlines()))
