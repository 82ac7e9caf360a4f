"""`gnmr-megatron prepare-data`: text to a tokenizer and an indexed dataset."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gnmr_megatron.data.corpus import Fields
from gnmr_megatron.data.instruction.options import (
    InstructionOptions,
    chat_template,
    tokenizer_file,
)
from gnmr_megatron.data.prepare import PreparedData, PrepareRequest, prepare
from gnmr_megatron.errors import DataError

EPILOG = """\
inputs: files or folders of .txt .md .rst .py (a document each), .jsonl (a document a line) and .parquet (a document
a row); all but Parquet also as .gz or .zst. `-` is standard input, one document of text, or JSON lines with
--json-key. `stdlib:` is the source text of Python's own standard library, which every machine has.

examples:
  gnmr-megatron prepare-data stdlib: --output data/stdlib --vocab-size 2048
  gnmr-megatron prepare-data books/ news.jsonl.zst --output data/mix --vocab-size 32000 --workers 16
  gnmr-megatron prepare-data more.parquet --parquet-column content --tokenizer-from data/mix --output data/more
  gnmr-megatron prepare-data chat.jsonl --format chat --tokenizer-from data/mix --sequence-length 2048 \\
      --output data/chat
"""


def run(arguments: Sequence[str]) -> int:
    """Prepare a dataset and tell about it."""
    options = _parser().parse_args(arguments)
    tokenizer = (
        options.tokenizer
        if options.tokenizer_from is None
        else tokenizer_file(options.tokenizer_from)
    )
    request = PrepareRequest(
        inputs=tuple(options.inputs),
        output=options.output,
        tokenizer=tokenizer,
        vocab_size=options.vocab_size,
        fields=Fields(
            json_key=options.json_key or "text",
            parquet_column=options.parquet_column,
            stdin_is_jsonl=options.json_key is not None,
        ),
        workers=options.workers,
        max_bad=options.max_bad,
        max_documents=options.max_documents,
        overwrite=options.overwrite,
        instruction=_instruction(options, tokenizer),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("reading", total=None)

        def show(documents: int, text_bytes: int) -> None:
            progress.update(
                task, description=f"{documents:,} documents, {text_bytes / 1e6:,.1f} MB"
            )

        result = prepare(request, on_progress=show)
    print(
        json.dumps(_plain(result))
        if options.json
        else _text(result, options.vocab_size if tokenizer is None else 0)
    )
    return 0


def _instruction(options: argparse.Namespace, tokenizer: Path | None) -> InstructionOptions | None:
    """How to read conversations; None for text."""
    if options.format == "text":
        for name in ("chat_template", "sequence_length", "too_long"):
            if getattr(options, name) is not None:
                raise DataError(
                    f"--{name.replace('_', '-')}: is for --format chat; add that or leave it out"
                )
        return None
    template, special_tokens = chat_template(
        options.chat_template, (tokenizer or Path("tokenizer")).parent
    )
    return InstructionOptions(
        template=template,
        special_tokens=special_tokens,
        sequence_length=options.sequence_length,
        too_long=options.too_long or "truncate",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron prepare-data",
        description="Turn text into a tokenizer and a Megatron indexed dataset (.bin and .idx), in one folder that is "
        "whole or not there. An equal request is not done again.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file, folder, - or (text only) stdlib:")
    add("--output", type=Path, required=True, help="folder to write")
    add(
        "--format",
        choices=["text", "chat"],
        default="text",
        help="chat: JSON lines of messages, or of prompt and completion (default: text)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tokenizer",
        type=Path,
        help="sentencepiece model or tokenizer.json to use; default: train one",
    )
    which.add_argument(
        "--tokenizer-from", type=Path, help="prepared dataset or tokenizer folder whose one to use"
    )
    add(
        "--chat-template",
        help="Jinja2 template, or a file of one; default: that of the tokenizer's folder, or a plain one",
    )
    add(
        "--sequence-length",
        type=int,
        help="most tokens of an example, its last one aside (default: any)",
    )
    add(
        "--too-long",
        choices=["truncate", "drop"],
        help="what to do with longer examples: cut off the end (default), or leave them out",
    )
    add(
        "--vocab-size",
        type=int,
        default=8192,
        help="size of a tokenizer to train (default: %(default)s)",
    )
    add("--json-key", help="key of the text in JSON lines (default: text)")
    add(
        "--parquet-column",
        default="text",
        help="column of the text in Parquet files (default: %(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes (default: all cores, %(default)s)",
    )
    add(
        "--max-bad",
        type=int,
        default=0,
        help="unreadable records to skip before failing (default: 0)",
    )
    add("--max-documents", type=int, help="stop after so many documents")
    add("--overwrite", action="store_true", help="replace a dataset of other inputs or options")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _plain(result: PreparedData) -> dict[str, object]:
    return {
        "folder": str(result.folder),
        "reused": result.is_reused,
        "seconds": round(result.seconds, 3),
        "other_files": result.other_files,
        "shown_bad_records": [str(bad) for bad in result.bad_records],
        **dataclasses.asdict(result.manifest),
    }


def _text(result: PreparedData, wanted_vocab_size: int) -> str:
    manifest = result.manifest
    how = (
        "reused, made earlier from the same inputs"
        if result.is_reused
        else f"written in {result.seconds:.1f} s"
    )
    is_chat = manifest.kind == "instruction"
    records = "examples" if is_chat else "documents"
    lines = [
        f"{result.folder}: {how}",
        f"  {manifest.documents:,} {records}, {manifest.text_bytes / 1e6:,.1f} MB, {manifest.tokens:,} tokens, "
        f"vocabulary {manifest.vocab_size:,}",
    ]
    if is_chat:
        lines.append(
            f"  {manifest.completion_tokens:,} tokens count in the loss; the longest example needs "
            f"--data.sequence_length {manifest.longest}"
        )
    if manifest.truncated:
        lines.append(f"  {manifest.truncated:,} examples lost their end: they were too long")
    if manifest.vocab_size < wanted_vocab_size:
        lines.append(
            f"  the text supports a vocabulary of {manifest.vocab_size:,}, not {wanted_vocab_size:,}"
        )
    left_out = {
        "empty documents": manifest.empty_documents,
        "unreadable records": manifest.bad_records,
        "files of other types": result.other_files,
        "examples that are too long": manifest.too_long,
        "examples with no completion within the length": manifest.without_completion,
    }
    if any(left_out.values()):
        lines.append(
            "  left out: "
            + ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
        )
    lines += [f"    {bad}" for bad in result.bad_records]
    return "\n".join(lines)
