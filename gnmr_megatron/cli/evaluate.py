"""`gnmr-megatron evaluate`: benchmarks of a checkpoint through lm-evaluation-harness."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gnmr_megatron.cli.output import results_console
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.training.harness.environment import prepare_environment
from gnmr_megatron.training.harness.options import EvaluationOptions

if TYPE_CHECKING:
    from gnmr_megatron.training.harness.evaluate import EvaluationResult

EPILOG = """\
examples:
  gnmr-megatron evaluate runs/quickstart --tasks perplexity
  gnmr-megatron evaluate runs/big --tasks hellaswag,mmlu --task-data benchmarks --num-fewshot 5 --output big-scores
  gnmr-megatron evaluate runs/big --tasks mmlu_anatomy --task-data benchmarks --path low \\
      --parallel.tensor_model_parallel_size 2

Nothing is downloaded. Data lie in --task-data as Hugging Face publishes them, or as
  hellaswag/validation.jsonl (and train.jsonl for solved examples)
  mmlu/SUBJECT/test.jsonl and dev.jsonl
Prompts and metrics are the harness's own; other tasks of it work alike, by the names of its dataset.
Under torchrun this is one rank of many; without it, the processes that the layout asks for are started here."""

_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def run(arguments: Sequence[str]) -> int:
    """Evaluate, on this rank or on processes started for it, and tell the results."""
    given = _parser().parse_args(arguments)
    options = _options(given)
    if given.output is not None and given.output.exists():
        raise ConfigError(f"--output: {given.output} is there already; choose another folder")
    prepare_environment()
    from gnmr_megatron.training.harness.subject import find_subject

    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    needed = world_size or options.layout.default_world_size
    subject = find_subject(options, world_size=needed)
    if world_size == 0 and needed > 1:
        from gnmr_megatron.training.launch import start_processes

        return start_processes(["-m", "gnmr_megatron", "evaluate", *arguments], needed)
    # imported here: what can be refused was refused before torch is loaded
    from gnmr_megatron.distributed.process_groups import stop_process_groups
    from gnmr_megatron.training.harness.evaluate import evaluate, write_details

    result = evaluate(subject, options)
    stop_process_groups()
    if result is None:
        return 0
    if given.output is not None:
        write_details(result, given.output)
    if given.json:
        print(json.dumps(result.as_dict(), default=str))
    else:
        _show(result, given.output)
    return 0


def _options(given: argparse.Namespace) -> EvaluationOptions:
    values = vars(given)
    names = {field.name for field in dataclasses.fields(EvaluationOptions)}
    layout = {
        key: values[f"parallel.{key}"] for key in _LAYOUT if values[f"parallel.{key}"] is not None
    }
    return EvaluationOptions(
        **{key: value for key, value in values.items() if key in names - {"tasks"}},
        tasks=tuple(name.strip() for name in given.tasks.split(",") if name.strip()),
        layout=ParallelLayout(**layout),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron evaluate",
        description="Run benchmarks of lm-evaluation-harness on a checkpoint, in any layout and on any of its paths.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint, or a run, whose newest one is taken")
    add("--tasks", required=True, help="names, with commas between: hellaswag,mmlu,perplexity, ...")
    add("--task-data", type=Path, metavar="DIR", help="folder of the tasks' data")
    add("--include-path", type=Path, metavar="DIR", help="folder of tasks of yours, in YAML")
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help='text of perplexity: a text file, or .jsonl of {"text": ...} (default: what the run held out)',
    )
    add(
        "--path",
        choices=("low", "recovery", "bf16", "fp32"),
        help="what linears run on: a path of the run, or plain linears (default: recovery where the run was under "
        "control, else low; without a run, plain linears of the model's type)",
    )
    add("--batch-size", type=int, default=8, help="prompts of a forward pass (default: 8)")
    add("--limit", type=int, metavar="N", help="only the first N documents of each task")
    add("--num-fewshot", type=int, metavar="N", help="solved examples before each question")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="longest prompt in tokens (default: the model's)",
    )
    add("--base", type=Path, help="where the base of adapters lies now")
    add("--files-from", type=Path, metavar="FOLDER", help="take the tokenizer from this folder")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--output", type=Path, metavar="DIR", help="write results.json and every sample there")
    for key in _LAYOUT:
        add(f"--parallel.{key}", type=int, metavar="N", help="as in `train`")
    return parser


def _show(result: EvaluationResult, output: Path | None) -> None:
    table = Table(box=SIMPLE_HEAD)
    for column in ("task", "documents", "solved examples", "metric", "value", "± standard error"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task, values in {**result.results, **result.groups}.items():
        first = [task, str(result.num_samples.get(task, "")), str(result.num_fewshot.get(task, ""))]
        for key, value in values.items():
            metric, _, rest = key.partition(",")
            if not rest or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{rest}")
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            table.add_row(*first, metric, f"{value:.4f}" if value < 1e6 else f"{value:.4g}", shown)
            first = ["", "", ""]
    console = results_console()
    console.print(f"{result.checkpoint}: step {result.step}, on its {result.path} path")
    console.print(table)
    if result.truncated:
        console.print(
            f"{result.truncated} prompts were longer than {result.max_length} tokens and lost their first ones"
        )
    if output is not None:
        console.print(f"all samples: {output}")
