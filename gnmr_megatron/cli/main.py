"""Entry point: find the verb, run it, and turn expected errors into one clear message."""

from __future__ import annotations

import importlib
import os
import select
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from gnmr_megatron import __version__
from gnmr_megatron.distributed.engine_import import import_engine_leanly
from gnmr_megatron.errors import ConfigError, DataError, GnmrError

# verb: (module with run(arguments) -> exit code, what it does)
VERBS = {
    "prepare-data": (
        "gnmr_megatron.cli.prepare_data",
        "turn text into a tokenizer and an indexed dataset",
    ),
    "train": (
        "gnmr_megatron.cli.train",
        "train a LLaMA under GNMR control, on one or many processes",
    ),
    "launch": (
        "gnmr_megatron.cli.launch",
        "show what will run where on a cluster, and start it",
    ),
    "doctor": (
        "gnmr_megatron.cli.doctor",
        "check machine, run and nodes before GPUs are paid for",
    ),
    "units": (
        "gnmr_megatron.cli.units",
        "show which path each projection runs on, and what it keeps",
    ),
    "checkpoint": (
        "gnmr_megatron.cli.checkpoint",
        "list, verify and prune the checkpoints of a run",
    ),
    "experiment": (
        "gnmr_megatron.cli.experiment",
        "compare policies and paths over a matrix of runs",
    ),
    "watch": (
        "gnmr_megatron.cli.watch",
        "show a run that another process trains, live",
    ),
    "replay": (
        "gnmr_megatron.cli.replay",
        "decide on recorded norms again, with the run's settings or with others",
    ),
    "explain": ("gnmr_megatron.cli.explain", "tell why a recorded step decided as it did"),
    "diff": ("gnmr_megatron.cli.diff", "tell where two recorded runs part, and why"),
    "calibrate": (
        "gnmr_megatron.cli.calibrate",
        "find thresholds for a wanted rate of exceedances, from a recorded run",
    ),
    "evaluate": (
        "gnmr_megatron.cli.evaluate",
        "run benchmarks of lm-evaluation-harness on a checkpoint",
    ),
    "convert": (
        "gnmr_megatron.cli.convert",
        "Hugging Face's LLaMA folders to checkpoints and back",
    ),
    "report": (
        "gnmr_megatron.cli.report",
        "show what runs did as one HTML page",
    ),
    "lora": ("gnmr_megatron.cli.lora", "merge adapters into their base, or write them for PEFT"),
    "summary": ("gnmr_megatron.cli.summary", "tell what a run did, from its folder"),
}

RUN_ERROR = 1
USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 1 failed while running, 2 wrong usage or settings."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        print(f"gnmr-megatron {__version__}")
        return 0
    verb = arguments[0]
    if verb not in VERBS:
        print(f"gnmr-megatron: unknown verb '{verb}'\n\n{_help()}", file=sys.stderr)
        return USAGE_ERROR
    # what the engine warns of (old torch names, no apex) is handled; its lines would bury ours on every rank
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    import_engine_leanly()
    try:
        code = int(importlib.import_module(VERBS[verb][0]).run(arguments[1:]))
        sys.stdout.flush()
        return code
    except GnmrError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank has met it; one a node tells
            print(f"gnmr-megatron {verb}: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError | DataError) else RUN_ERROR
    except BrokenPipeError:
        if not _is_abandoned(sys.stdout):
            raise
        # who reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        return RUN_ERROR
    except KeyboardInterrupt:
        print(f"gnmr-megatron {verb}: interrupted", file=sys.stderr)
        return 130


def _is_abandoned(stream: TextIO) -> bool:
    """Whether a pipe has no reader any more."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _help() -> str:
    lines = [
        "usage: gnmr-megatron VERB ...",
        "",
        "Low-precision LLaMA pretraining under GNMR control. Verbs (each has a --help):",
        "",
        *(f"  {verb:14} {what}" for verb, (_, what) in VERBS.items()),
        "",
        "First run, from a clone: make quickstart",
    ]
    return "\n".join(lines)
