"""`gnmr-megatron doctor`: a check-up of machine, run and nodes before GPUs are paid for."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.errors import ConfigError
from gnmr_megatron.training.checkup.checkup import UNREADABLE, Subject, check_up
from gnmr_megatron.training.checkup.findings import Finding, Report
from gnmr_megatron.training.config_files import parse_run, run_parser, with_resume

DESCRIPTION = """\
A check-up before a run is paid for: versions, GPUs, which precision paths run here, memory and disk against what the
run needs, ports, W&B, data and folders. Without settings it looks at the machine alone. It changes nothing.

Started by torchrun, every process takes part: software, settings and data are compared over all nodes, clocks are
measured against the first node's, and an all-reduce is timed."""

EPILOG = """\
examples:
  gnmr-megatron doctor
  gnmr-megatron doctor --config configs/runs/quickstart.yaml
  gnmr-megatron doctor --config configs/runs/llama2_7b.yaml --nodes 16 --nproc-per-node 8 --json
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m gnmr_megatron doctor --config configs/runs/llama2_7b.yaml

Exit codes: 0 nothing that is required is broken; 1 something is; 2 the settings cannot be read."""

COLORS = {"ok": "green", "warning": "yellow", "problem": "bold red", "not applicable": "dim"}
PIPED_WIDTH = 140


def run(arguments: Sequence[str]) -> int:
    """Look at everything and print what was found."""
    own = argparse.ArgumentParser(prog="gnmr-megatron doctor", add_help=False, allow_abbrev=False)
    _add_options(own)
    options, rest = own.parse_known_args(arguments)
    if rest and not rest[0].startswith("-"):
        rest = ["--config", *rest]
    report = check_up(_subject(options, rest))
    if os.environ.get("RANK", "0") == "0" or report.processes == 1:
        if options.json:
            print(json.dumps(report.as_dict()))
        else:
            _print(report)
    if any(finding.check == UNREADABLE for finding in report.findings):
        return 2
    return int(not report.is_ready)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="nodes of the run (default: 1)")
    add("--nproc-per-node", type=int, help="processes of a node (default: by the layout)")
    add(
        "--rdzv-endpoint",
        default=os.environ.get("MASTER_PORT")
        and f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ['MASTER_PORT']}",
        metavar="HOST:PORT",
        help="where processes meet (default: MASTER_ADDR and MASTER_PORT, or this machine's port 29500)",
    )
    add("--json", action="store_true", help="print one JSON object instead")


def _subject(options: argparse.Namespace, arguments: Sequence[str]) -> Subject:
    for option in ("nodes", "nproc_per_node"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')}: {value} must be at least 1")
    parser = run_parser("gnmr-megatron doctor", description=DESCRIPTION, epilog=EPILOG)
    parser.usage = "%(prog)s [--config FILE] [--SECTION.KEY VALUE ...] [--nodes N] [--nproc-per-node M] [--json]"
    _add_options(parser)  # for --help; they are parsed before
    config, unreadable = None, None
    if arguments:
        try:
            config, _ = parse_run(parser, with_resume(arguments))
        except (
            ConfigError
        ) as error:  # the machine is looked at nevertheless, and other processes wait
            unreadable = str(error)
    return Subject(
        config=config,
        unreadable=unreadable,
        nodes=options.nodes,
        nproc_per_node=options.nproc_per_node,
        endpoint=options.rdzv_endpoint,
    )


def _print(report: Report) -> None:
    console = Console(width=None if Console().is_terminal else PIPED_WIDTH, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for name, width in (("topic", 15), ("check", 30), ("status", 14)):
        table.add_column(name, width=width)
    table.add_column("found")
    topics = dict.fromkeys(finding.topic for finding in report.findings)
    for topic in topics:
        title = topic
        for finding, checks in _rows([f for f in report.findings if f.topic == topic]):
            where = f"{finding.node}: " if len(report.nodes) > 1 and finding.node else ""
            advice = f"\n-> {finding.advice}" if finding.advice else ""
            status = f"[{COLORS[finding.status]}]{finding.status}[/]"
            table.add_row(title, checks, status, _plain(f"{where}{finding.detail}{advice}"))
            title = ""
        table.add_section()
    console.print(table)
    console.print(_plain(report.sentence), soft_wrap=True)


def _rows(findings: Sequence[Finding]) -> Iterator[tuple[Finding, str]]:
    """Neighbours of which the same is said share a row."""
    for _, group in itertools.groupby(
        findings, key=lambda f: (f.node, f.status, f.detail, f.advice)
    ):
        alike = list(group)
        yield alike[0], ", ".join(finding.check for finding in alike)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
