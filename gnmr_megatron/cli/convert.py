"""`gnmr-megatron convert`: Hugging Face's LLaMA folders to checkpoints and back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gnmr_megatron.errors import ConfigError

if TYPE_CHECKING:
    from gnmr_megatron.training.conversion import Conversion

TO_MEGATRON = """\
what to do then, to fine-tune:
  gnmr-megatron convert hf-to-megatron Llama-3.2-1B --output checkpoints/llama
  gnmr-megatron prepare-data books/ --tokenizer checkpoints/llama/huggingface/tokenizer.json --output data/books
  gnmr-megatron train --config checkpoints/llama/config.yaml --data.datasets '[data/books]' --optimizer.lr 1e-5
  gnmr-megatron convert megatron-to-hf runs/run --output Llama-books

config.yaml in the output holds `model:` and `init_from:`. With settings of your own, name them first:
`--config mine.yaml --config checkpoints/llama/config.yaml`. The checkpoint loads in any layout; choose it with
--parallel.* when you train. Training starts at step 0: optimizer, schedule, data and control are new.

Read are safetensors in BF16 and F32, and F16, which becomes FP32 (--model.dtype bf16 trains it in BF16). Refused, by
its field, is whatever in config.json this LLaMA cannot represent."""
TO_HUGGINGFACE = """\
examples:
  gnmr-megatron convert megatron-to-hf runs/quickstart --output quickstart-hf
  gnmr-megatron convert megatron-to-hf runs/big/checkpoints/step_00010000 --output big-hf --max-shard-size 2GB

Weights are written as the model computes with them. A safetensors file holds one layer, or less if that is larger than
--max-shard-size. The tokenizer and config.json's other fields are those that the model was converted with, also for a
run that started from it with init_from; else the tokenizer is that of the run's data and max_position_embeddings its
data.sequence_length. A scratch run's config.json can be replaced with --files-from."""
_SIZES = {"MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": 1 << 30}


def run(arguments: Sequence[str]) -> int:
    """Convert, and tell what was written."""
    options = _parser().parse_args(arguments)
    # imported here: --help and wrong options need no torch
    from gnmr_megatron.training.conversion import huggingface_to_megatron, megatron_to_huggingface

    console = Console(stderr=True)
    columns = (TextColumn("layers"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("layers", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        if options.verb == "hf-to-megatron":
            result = huggingface_to_megatron(options.source, options.output, on_progress=show)
        else:
            result = megatron_to_huggingface(
                options.source,
                options.output,
                files_from=options.files_from,
                max_shard_bytes=_num_bytes(options.max_shard_size),
                on_progress=show,
            )
    print(_as_json(result) if options.json else _as_text(result, options.verb))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron convert",
        description="Hugging Face's LLaMA folders to checkpoints and back: exact, layer by layer, in the memory of one "
        "layer. The output is complete or not there; nothing is overwritten.",
    )
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="hf-to-megatron | megatron-to-hf"
    )
    to_megatron = _add_verb(
        verbs,
        "hf-to-megatron",
        "Write a checkpoint that `train` starts from, out of a folder with config.json and safetensors.",
        TO_MEGATRON,
    )
    to_megatron.add_argument(
        "source", type=Path, metavar="HF_FOLDER", help="what save_pretrained wrote"
    )
    to_huggingface = _add_verb(
        verbs,
        "megatron-to-hf",
        "Write a folder that transformers' from_pretrained loads, out of a checkpoint.",
        TO_HUGGINGFACE,
    )
    to_huggingface.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint, or a run, whose newest one is taken",
    )
    to_huggingface.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest safetensors file, such as 500MB (default: %(default)s); a single tensor may be larger",
    )
    to_huggingface.add_argument(
        "--files-from",
        type=Path,
        metavar="FOLDER",
        help="take config.json's other fields and the tokenizer from this folder",
    )
    for verb in (to_megatron, to_huggingface):
        verb.add_argument("--output", type=Path, required=True, help="folder to write")
        verb.add_argument(
            "--json", action="store_true", help="print one JSON object instead of text"
        )
    return parser


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, epilog: str
) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=what,
        description=what,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _num_bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([MG]i?B)", size.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--max-shard-size: '{size}' must be a size such as 500MB or 5GB")
    return int(match[1]) * _SIZES[match[2].upper()]


def _as_json(result: Conversion) -> str:
    return json.dumps(dataclasses.asdict(result), default=str)


def _as_text(result: Conversion, verb: str) -> str:
    lines = [
        f"{result.folder}: written in {result.seconds:.1f} s",
        f"  {result.parameters:,} parameters in {result.dtype}, {result.num_bytes / 1e6:,.1f} MB; tokenizer: "
        f"{result.tokenizer or 'none'}",
        *(f"  note: {note}" for note in result.notes),
    ]
    if verb == "hf-to-megatron":
        tokenizer = result.tokenizer or "TOKENIZER"
        lines += [
            f"try next   gnmr-megatron prepare-data TEXT --tokenizer {tokenizer} --output data/mine",
            f"           gnmr-megatron train --config {result.folder}/config.yaml --data.datasets '[data/mine]'",
        ]
    return "\n".join(lines)
