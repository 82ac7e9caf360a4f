"""What the user asks of an evaluation; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.errors import ConfigError

PathChoice = Literal["low", "recovery", "bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """An evaluation.

    Attributes:
        checkpoint: a checkpoint, or a run, whose newest one is taken.
        tasks: names of the harness's tasks, groups or tags, and `perplexity`.
        task_data: folder of the tasks' data.
        include_path: folder of further tasks in the harness's YAML.
        text: file of the text for `perplexity`; None for the run's held-out documents.
        path: what the linears run on: the run's low or recovery path, or plain linears of a type. None for the
            recovery path where the run was under control, its low path where not, and plain linears without a run.
        layout: how processes share the model.
        batch_size: prompts of a forward pass.
        limit: only so many of each task's documents.
        num_fewshot: solved examples before each question; None leaves it to the task.
        max_length: longest prompt in tokens; None for what the model was made for.
        base: where the base of adapters lies now; None for where it was in training.
        files_from: folder with config.json and tokenizer files; None finds them by the checkpoint.

    Raises:
        ConfigError: a value is out of range; the message names the option.
    """

    checkpoint: Path
    tasks: tuple[str, ...]
    task_data: Path | None = None
    include_path: Path | None = None
    text: Path | None = None
    path: PathChoice | None = None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    batch_size: int = 8
    limit: int | None = None
    num_fewshot: int | None = None
    max_length: int | None = None
    base: Path | None = None
    files_from: Path | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("--tasks: names no task; try hellaswag,mmlu,perplexity")
        for name, least in (("batch_size", 1), ("limit", 1), ("max_length", 2), ("num_fewshot", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')}: {value} must be at least {least}")
        for option, folder in (
            ("--task-data", self.task_data),
            ("--include-path", self.include_path),
        ):
            if folder is not None and not folder.is_dir():
                raise ConfigError(f"{option}: {folder} is no folder")
        if self.text is not None and not self.text.is_file():
            raise ConfigError(f"--text: there is no file {self.text}")
        if self.text is not None and "perplexity" not in self.tasks:
            raise ConfigError("--text: is for the task perplexity; add it to --tasks")
