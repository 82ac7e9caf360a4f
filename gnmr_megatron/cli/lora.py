"""`gnmr-megatron lora`: merge adapters into their base, or write them for PEFT."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

MERGE = """\
examples:
  gnmr-megatron lora merge runs/books --output books-merged
  gnmr-megatron convert megatron-to-hf books-merged --output books-hf

The base is where it was in training, or where --base says; it is not changed, so to take the adapters out again is to
use the base. What is written is a checkpoint of whole weights, in the type of the base."""
EXPORT = """\
examples:
  gnmr-megatron lora export runs/books --output books-adapter --base-model meta-llama/Llama-3.2-1B

then, in Python:
  PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B"), "books-adapter")"""


def run(arguments: Sequence[str]) -> int:
    """Merge or export, and tell what was written."""
    options = _parser().parse_args(arguments)
    # imported here: --help and wrong options need no torch
    from gnmr_megatron.training.adapter_files import export_to_peft, merge

    if options.verb == "merge":
        result = merge(
            options.source, options.output, base=options.base, files_from=options.files_from
        )
    else:
        result = export_to_peft(options.source, options.output, base_model=options.base_model)
    if options.json:
        print(json.dumps(dataclasses.asdict(result), default=str))
    else:
        what = "merged into whole weights" if options.verb == "merge" else "written for PEFT"
        print(
            f"{result.folder}: adapters of {result.units} units ({result.parameters:,} parameters) {what}"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron lora",
        description="Merge a checkpoint of adapters into its base, or write it for PEFT. The output is complete or not "
        "there; nothing is overwritten.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="merge | export")
    merging = _add_verb(verbs, "merge", "Write a checkpoint of whole weights.", MERGE)
    merging.add_argument("--base", type=Path, help="where the base lies now")
    merging.add_argument(
        "--files-from",
        type=Path,
        metavar="FOLDER",
        help="take config.json's other fields and the tokenizer from this folder",
    )
    exporting = _add_verb(
        verbs, "export", "Write adapter_config.json and adapter_model.safetensors.", EXPORT
    )
    exporting.add_argument(
        "--base-model",
        metavar="NAME",
        help="name or folder of the base as Hugging Face's library knows it, for adapter_config.json",
    )
    return parser


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=description,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint of adapters, or a run, whose newest one is taken",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser
