"""An evaluation from options to results, on one rank."""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from gnmr_megatron.distributed.process_groups import gather_from_all
from gnmr_megatron.errors import ConfigError, DataError, GnmrError
from gnmr_megatron.models.huggingface_config import huggingface_config
from gnmr_megatron.models.huggingface_files import read_json
from gnmr_megatron.training.companions import GENERATION, write_companions
from gnmr_megatron.training.harness.model import load_model
from gnmr_megatron.training.harness.options import EvaluationOptions
from gnmr_megatron.training.harness.scoring import ScoringModel
from gnmr_megatron.training.harness.subject import Subject

if TYPE_CHECKING:
    from gnmr_megatron.training.harness.language_model import MegatronLM


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What an evaluation found.

    Attributes:
        checkpoint: what was evaluated.
        step: steps it was trained for.
        path: what the linears ran on.
        max_length: longest prompt in tokens.
        truncated: prompts that were longer and lost their first tokens.
        seconds: time of the evaluation, without loading.
        results: the harness's metrics of each task, `metric,filter` to value.
        groups: the same of groups of tasks.
        num_samples: documents of each task.
        num_fewshot: solved examples before each question, by task.
        versions: version of each task.
        details: all that the harness told, samples included.
    """

    checkpoint: str
    step: int
    path: str
    max_length: int
    truncated: int
    seconds: float
    results: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    num_samples: dict[str, int]
    num_fewshot: dict[str, int]
    versions: dict[str, Any]
    details: dict[str, Any] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """All but the details, in plain values; None for what is not finite, which JSON cannot say."""
        return {key: _plain(value) for key, value in asdict(self).items() if key != "details"}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluate(subject: Subject, options: EvaluationOptions) -> EvaluationResult | None:
    """Load the checkpoint and run the tasks; all ranks take part.

    Important:
        `prepare_environment` comes before it, and `stop_process_groups` after it.

    Returns:
        The result on rank 0, None on others.

    Raises:
        GnmrError: alike on every rank.
    """
    with tempfile.TemporaryDirectory(prefix="gnmr-evaluate-") as folder:
        model = load_model(subject)
        scoring = ScoringModel(
            model, batch_size=options.batch_size, length_multiple=subject.length_multiple
        )
        lm, tasks = _prepare(subject, options, scoring, Path(folder))
        started = time.perf_counter()
        with model.switchboard.evaluating(on_recovery=subject.path == "recovery"):
            details = _run(lm, tasks, options.limit)
        seconds = time.perf_counter() - started
    return _result(subject, lm, details, seconds) if dist.get_rank() == 0 else None


def _prepare(
    subject: Subject, options: EvaluationOptions, scoring: ScoringModel, work: Path
) -> tuple[MegatronLM, Any]:
    """The language model and its tasks; all ranks take part.

    Raises:
        GnmrError: a task or its data are not there; on every rank.
    """
    # imported here: they read the environment when they are loaded
    from transformers import AutoTokenizer

    from gnmr_megatron.training.harness.language_model import MegatronLM
    from gnmr_megatron.training.harness.tasks import PERPLEXITY, LocalTasks
    from gnmr_megatron.training.harness.texts import documents

    problem: GnmrError | None = None
    try:
        found = LocalTasks(
            options.tasks,
            include_path=options.include_path,
            data=options.task_data,
            num_fewshot=options.num_fewshot,
            work=work,
        )
        texts = None
        if PERPLEXITY in options.tasks:
            assert subject.companions.tokenizer is not None  # checked by find_subject
            texts = documents(
                options.text, subject.run, subject.companions.tokenizer, limit=options.limit
            )
        tasks = found.load(texts)
        folder = _exported_tokenizer(subject, work / "tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        generation = read_json(folder / GENERATION)
    except GnmrError as error:
        problem = error
    problems = gather_from_all(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    elsewhere = next((text for text in problems if text is not None), None)
    if elsewhere is not None:
        raise DataError(elsewhere)
    lm = MegatronLM(
        scoring,
        tokenizer,
        max_length=subject.max_length,
        batch_size=options.batch_size,
        generation=generation,
    )
    return lm, tasks


def _exported_tokenizer(subject: Subject, folder: Path) -> Path:
    """Write the tokenizer as `convert megatron-to-hf` does, so that prompts are those of the exported model."""
    folder.mkdir()
    config = huggingface_config(
        subject.config.model,
        vocab_size=subject.vocab_size,
        dtype="float32",
        other_fields=subject.companions.fields,
    )
    write_companions(subject.companions, config, folder)
    return folder


def _run(lm: MegatronLM, tasks: Any, limit: int | None) -> dict[str, Any]:
    from lm_eval import evaluator

    # as the harness's own command line does; ranks have to draw the same
    random.seed(0)
    np.random.seed(1234)  # noqa: NPY002  # what tasks draw from
    torch.manual_seed(1234)
    is_first = dist.get_rank() == 0
    details: dict[str, Any] = evaluator.evaluate(
        lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=100_000 if is_first else 0
    )
    return details


def _result(
    subject: Subject, lm: MegatronLM, details: dict[str, Any], seconds: float
) -> EvaluationResult:
    return EvaluationResult(
        checkpoint=str(subject.checkpoint),
        step=subject.step,
        path=subject.path,
        max_length=subject.max_length,
        truncated=lm.truncated,
        seconds=seconds,
        results={name: dict(values) for name, values in details["results"].items()},
        groups={name: dict(values) for name, values in details.get("groups", {}).items()},
        num_samples={name: each["effective"] for name, each in details["n-samples"].items()},
        num_fewshot=dict(details["n-shot"]),
        versions=dict(details["versions"]),
        details=details,
    )


def write_details(result: EvaluationResult, folder: Path) -> None:
    """Write results.json, and the samples of each task as JSON lines, into a new folder.

    Raises:
        ConfigError: there is something of that name, or it cannot be written.
    """
    from lm_eval.utils import handle_non_serializable

    details = dict(result.details)
    samples = details.pop("samples", {})
    try:
        folder.mkdir(parents=True)
        content = {**result.as_dict(), "harness": _plain(details)}
        (folder / "results.json").write_text(
            json.dumps(content, indent=1, default=handle_non_serializable) + "\n"
        )
        for task, entries in samples.items():
            lines = (json.dumps(entry, default=handle_non_serializable) for entry in entries)
            (folder / f"samples_{task}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be written ({error.strerror})") from error
