"""`gnmr-megatron launch`: what will run where, and whether all nodes would run the same."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.data.manifest import describe_datasets
from gnmr_megatron.errors import CheckpointError, DataError, GnmrError
from gnmr_megatron.observability.summary import summarize
from gnmr_megatron.training.config import RunConfig, validate
from gnmr_megatron.training.config_files import parse_run, run_parser, with_resume
from gnmr_megatron.training.launch_check import PROBLEM, Meeting, compare_nodes, node_facts
from gnmr_megatron.training.launch_plan import LaunchPlan, Place
from gnmr_megatron.training.run_folder import choose_run_folder

DESCRIPTION = """\
Show what will run where: torchrun's command, the coordinates of each rank, the layers and units of each pipeline
stage, and the batch arithmetic. Then start it, where it is one node; many start launch/torchrun_multi_node.sh each.

The launch scripts also use it: --check compares versions, settings and data of all nodes, and --status tells how the
run that `--resume auto` would go on with ended."""

EPILOG = """\
examples:
  gnmr-megatron launch configs/runs/llama2_7b.yaml --nodes 16 --nproc-per-node 8 --dry-run
  gnmr-megatron launch configs/runs/llama2_13b.yaml --nodes 128 --nproc-per-node 8 --dry-run --json
  gnmr-megatron launch configs/runs/quickstart.yaml --train.steps 400
  gnmr-megatron launch configs/runs/quickstart.yaml --status"""

SCRIPT = Path(__file__).parents[2] / "launch" / "torchrun_single_node.sh"
EACH_RANK_UP_TO = 32  # ranks that have a line each; above, nodes that are alike share one


def run(arguments: Sequence[str]) -> int:
    """Show the plan and start it, or compare nodes, or tell how a run ended."""
    own = argparse.ArgumentParser(prog="gnmr-megatron launch", add_help=False, allow_abbrev=False)
    _add_options(own)
    options, rest = own.parse_known_args(arguments)
    if rest and not rest[0].startswith("-"):
        rest = ["--config", *rest]
    if options.check:
        return _check(options, rest)
    parser = _settings_parser()
    config, _ = parse_run(parser, with_resume(rest))
    if options.status:
        print(_status(config))
        return 0
    nproc = options.nproc_per_node or -(-config.parallel.default_world_size // options.nodes)
    plan = LaunchPlan(config, options.nodes, nproc, tuple(rest))
    warnings = [*_settings_warnings(plan, may_lack_data=options.dry_run), *plan.warnings()]
    if options.json:
        print(json.dumps({**plan.as_dict(), "warnings": warnings}))
    else:
        _print(plan, warnings)
    if options.nodes == 1 and not options.dry_run:
        _start(plan)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    add("--nproc-per-node", type=int, help="processes of a node (default: what the layout needs)")
    add("--dry-run", action="store_true", help="start nothing; data need not be here")
    add("--json", action="store_true", help="print one JSON object, with every rank")
    add("--check", action="store_true", help="compare all nodes; start it on each of them")
    add("--rdzv-endpoint", default="localhost:29501", help="with --check: where nodes meet")
    add("--rdzv-id", default="gnmr", help="with --check: name of the meeting")
    add("--rdzv-conf", default="", help="with --check: KEY=VALUE,... as torchrun takes it")
    add("--status", action="store_true", help="print how the run ended: completed, signal, none")


def _settings_parser() -> Any:
    parser = run_parser("gnmr-megatron launch", description=DESCRIPTION, epilog=EPILOG)
    parser.usage = "%(prog)s CONFIG [--nodes N] [--nproc-per-node M] [--SECTION.KEY VALUE ...] [--dry-run] [--json]"
    _add_options(parser)  # for --help; they are parsed before
    return parser


def _check(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    def facts() -> dict[str, str]:
        config, _ = parse_run(_settings_parser(), with_resume(arguments))
        return node_facts(config, world_size=options.nodes * options.nproc_per_node)

    if options.nodes == 1:
        facts()
        return 0
    try:
        found = facts()
    except GnmrError as error:  # others wait for this node: tell them
        found = {PROBLEM: str(error)}
    compare_nodes(
        found,
        Meeting(
            nodes=options.nodes,
            endpoint=options.rdzv_endpoint,
            run_id=options.rdzv_id,
            options=dict(pair.split("=", 1) for pair in options.rdzv_conf.split(",") if pair),
        ),
    )
    return 0


def _status(config: RunConfig) -> str:
    resume = "latest" if config.resume in (None, "auto") else config.resume
    try:
        folder = choose_run_folder(Path(config.runs_dir), config.name, resume)
    except CheckpointError:
        return "none"
    return summarize(folder.path).finished or "unfinished"


def _start(plan: LaunchPlan) -> None:
    if not SCRIPT.exists():
        raise GnmrError(
            f"{SCRIPT}: is not there, it comes with a clone; start this: {shlex.join(plan.command)}"
        )
    environment = {**os.environ, "NPROC_PER_NODE": str(plan.nproc_per_node)}
    os.execve(SCRIPT, [str(SCRIPT), *plan.arguments], environment)  # noqa: S606  # no shell is meant


def _settings_warnings(plan: LaunchPlan, *, may_lack_data: bool) -> Iterator[str]:
    """Refuse what cannot run; without data, check all but the vocabulary."""
    layout = plan.config.parallel
    try:
        vocab_size = describe_datasets(plan.config.data).vocab_size
    except DataError as error:
        if not may_lack_data:
            raise
        vocab_size = layout.tensor_model_parallel_size * plan.config.model.vocab_padding_multiple
        yield f"the size of the vocabulary is not checked: {error}"
    validate(plan.config, world_size=plan.world_size, vocab_size=vocab_size)


def _print(plan: LaunchPlan, warnings: Sequence[str]) -> None:
    console = Console(width=None if Console().is_terminal else 140)
    where = "on every node (HEAD_ADDR is one of them)" if plan.nodes > 1 else "here"
    _say(console, f"{where}: {shlex.join(plan.command)}")
    console.print(_rank_table(plan))
    console.print(_stage_table(plan))
    batch = plan.batch()
    _say(
        console,
        f"step: {batch['replicas']} replicas x {batch['microbatches']} microbatches x {batch['micro_batch_size']} "
        f"sequences = {batch['sequences']:,} sequences, {batch['tokens']:,} tokens; {batch['steps']:,} steps, "
        f"{batch['steps'] * batch['tokens']:,} tokens; stages idle {batch['pipeline_idle_percent']} % of a step",
    )
    for warning in warnings:
        _say(console, f"warning: {warning}")


def _rank_table(plan: LaunchPlan) -> Table:
    columns = ("node", "local_rank", "rank", "tp", "cp", "dp", "pp")
    table = Table(*(name.replace("_", " ") for name in columns), box=SIMPLE_HEAD)
    for places in _alike(plan):
        table.add_row(*(_span([getattr(place, name) for place in places]) for name in columns))
    return table


def _alike(plan: LaunchPlan) -> Iterator[list[Place]]:
    """Ranks that share a line: one each, or all of neighbouring nodes that hold the same stages."""
    places = [plan.place(rank) for rank in range(plan.world_size)]
    if plan.world_size <= EACH_RANK_UP_TO:
        yield from ([place] for place in places)
        return
    by_node = [list(node) for _, node in itertools.groupby(places, key=lambda place: place.node)]
    for _, group in itertools.groupby(by_node, key=lambda node: {place.pp for place in node}):
        yield [place for node in group for place in node]


def _stage_table(plan: LaunchPlan) -> Table:
    table = Table("stage", "layers", "projections", "units under control", box=SIMPLE_HEAD)
    for row in plan.stages():
        spans = ", ".join(_span(chunk) for chunk in row["layers"])
        table.add_row(str(row["stage"]), spans, str(row["projections"]), str(row["units"]))
    return table


def _span(values: Sequence[int]) -> str:
    first, last = min(values), max(values)
    return str(first) if first == last else f"{first}..{last}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
