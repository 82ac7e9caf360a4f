"""`gnmr-megatron experiment NAME`: take the runs of a suite, and tell what came out of them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gnmr_megatron.analysis.experiments.correlation import correlations
from gnmr_megatron.analysis.experiments.detection import detection
from gnmr_megatron.analysis.experiments.matrix import plan, take
from gnmr_megatron.analysis.experiments.planned_run import PlannedRun
from gnmr_megatron.analysis.experiments.preparation import (
    dataset_commands,
    plan_preparation,
    prepare_datasets,
)
from gnmr_megatron.analysis.experiments.results import RunFigures, by_arm, figures_of
from gnmr_megatron.analysis.experiments.suite import SMOKE, find_suite
from gnmr_megatron.analysis.experiments.tables import (
    as_csv,
    as_json,
    as_markdown,
    faults_as_markdown,
    ranking_as_markdown,
)
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.analysis.report import write_report
from gnmr_megatron.cli.units import UnitsTable
from gnmr_megatron.data.manifest import describe_datasets
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.observability.append_file import replace_file
from gnmr_megatron.training.config import validate
from gnmr_megatron.training.config_files import parse_run, run_parser

SUITES = Path("configs/experiments")

OF_THE_SUITE = {
    "seed": "seeds are those of the suite's size; change them there",
    "name": "runs are named by their arms and seeds",
    "runs_dir": "runs are in the suite's folder; give another --output",
    "resume": "runs go on by themselves where they stopped",
}
"""Settings that are no arm's, and why."""

DESCRIPTION = """\
Take a matrix of runs (arms x seeds) and compare them: held-out loss with 95 % intervals, share of the gap between low
and high path that is closed, recovered unit-steps, spikes, detection of faults. Runs that are done stay; the others
start, or go on where they stopped.

Writes OUTPUT/results.csv, results.md, report.html (a run of each arm) and a run folder for each run."""

EPILOG = """\
examples:
  gnmr-megatron experiment activation_stress --smoke
  gnmr-megatron experiment activation_stress
  gnmr-megatron experiment transient_faults --json
  gnmr-megatron experiment activation_stress --size llama2_350m --launch launch/torchrun_single_node.sh"""


def run(arguments: Sequence[str]) -> int:
    """Take a suite."""
    options = _parser().parse_args(arguments)
    suite = find_suite(options.name, SUITES)
    size_name = SMOKE if options.smoke else options.size
    output = options.output or Path("runs/experiments") / f"{suite.name}-{size_name}"
    size = suite.size(size_name)
    runs = plan(suite, size, output, _overrides(options.set))
    preparation = plan_preparation(suite, size, output)
    if options.dry_run:
        _check([*preparation, *runs], reads_data=False)
        _tell_commands(dataset_commands(suite, size, output), [*preparation, *runs], options.launch)
        return 0
    prepare_datasets(suite, size, output, [*preparation, *runs])
    _check([*preparation, *runs])
    jobs = options.jobs or (1 if options.launch else _default_jobs())
    signal.signal(signal.SIGTERM, _end)
    failures = _take([*preparation, *runs], at_once=jobs, launch=options.launch)
    done = [planned for planned in runs if planned.is_done]
    undisturbed = {
        planned.seed: RecordedRun(planned.folder)
        for planned in done
        if planned.arm.name == suite.high
    }
    found = {
        planned.folder: detection(RecordedRun(planned.folder), undisturbed.get(planned.seed))
        for planned in done
    }
    rows = [
        figures_of(planned, found[planned.folder], kept_bytes=_kept_bytes(planned))
        for planned in done
    ]
    gap, arms = by_arm(suite, rows)
    answers = {
        arm.arm: [
            answer
            for planned in done
            if planned.arm.name == arm.arm
            for answer in found[planned.folder].answers
        ]
        for arm in arms
    }
    ranking = {
        planned.folder.name: ranks
        for planned in done
        if (ranks := correlations(RecordedRun(planned.folder)))
    }
    tables = (
        as_markdown(suite, gap, arms), faults_as_markdown(answers), ranking_as_markdown(ranking),
    )  # fmt: skip
    _write(output, rows, "\n".join(table for table in tables if table))
    first = {planned.arm.name: planned.folder for planned in reversed(done)}
    if first:  # a page of all runs would be large: one of each arm
        write_report(list(first.values())[::-1], output / "report.html")
    if options.json:
        sys.stdout.write(json.dumps(as_json(suite, gap, arms)) + "\n")
    else:
        sys.stdout.write((output / "results.md").read_text())
        sys.stdout.write(
            f"written: {output}/results.csv, results.md, report.html (a run of each arm)\n"
        )
    for failure in failures:
        sys.stderr.write(f"gnmr-megatron experiment: {failure}\n")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnmr-megatron experiment",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", help=f"a file of {SUITES} without its ending, or the path of one")
    parser.add_argument("--size", default="small", help="size of the runs (default: small)")
    parser.add_argument("--smoke", action="store_true", help=f"short for --size {SMOKE}")
    parser.add_argument("--output", type=Path, help="folder (default: runs/experiments/NAME-SIZE)")
    parser.add_argument(
        "--jobs",
        type=_positive,
        help="runs at a time (default: a core each; 1 with --launch, or where there is a GPU)",
    )
    parser.add_argument(
        "--launch",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="what starts a run on many processes, in place of `gnmr-megatron train`",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a setting of all arms; may be given again",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, take no run")
    parser.add_argument("--json", action="store_true", help="print one JSON object of the figures")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _end(_number: int, _frame: object) -> None:
    """On SIGTERM, end as after any exception: runs save and end first."""
    raise SystemExit(128 + signal.SIGTERM)


def _check(runs: Sequence[PlannedRun], *, reads_data: bool = True) -> None:
    """Check the settings of each arm before the first run starts; those that follow from other runs are not known yet.

    Raises:
        ConfigError: which arm has settings that are wrong or do not fit each other.
    """
    parser = run_parser("gnmr-megatron experiment", description="", epilog="")
    for name, planned in {planned.arm.name: planned for planned in runs}.items():
        try:
            config, _ = parse_run(parser, ["--config", str(planned.base), *_options(planned)])
            if reads_data:
                data = describe_datasets(config.data)
                world_size = config.parallel.default_world_size
                validate(config, world_size=world_size, vocab_size=data.vocab_size)
        except ConfigError as error:
            problems = str(error).splitlines()
            raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems)) from error


def _options(planned: PlannedRun) -> list[str]:
    return [f"--{key}={_plain(value)}" for key, value in planned.placed_settings.items()]


def _default_jobs() -> int:
    """A core for each run; one at a time where they would share a GPU."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return 1 if has_gpu else os.cpu_count() or 1


def _tell_commands(
    datasets: Sequence[Sequence[str]], runs: Sequence[PlannedRun], launch: Sequence[str]
) -> None:
    """What would be typed to take the runs by hand, in order."""
    for command in datasets:
        print(shlex.join(["gnmr-megatron", *command]))
    for planned in runs:
        sources = {"budget": planned.budget_from, "thresholds": planned.calibrated_on}
        for what, source in sources.items():
            if source is not None:
                print(f"# {planned.folder.name}: without the {what} that {source.name} gives it")
        where = ["--name", planned.folder.name, "--runs_dir", str(planned.folder.parent)]
        verb = launch or ("gnmr-megatron", "train")
        print(shlex.join([*verb, "--config", str(planned.base), *where, *_options(planned)]))


def _overrides(items: Sequence[str]) -> dict[str, Any]:
    found = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {item}: must be SECTION.KEY=VALUE")
        if key in OF_THE_SUITE:
            raise ConfigError(f"--set {item}: {OF_THE_SUITE[key]}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {item}: is no YAML: {' '.join(str(error).split())}"
            ) from error
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _take(runs: Sequence[PlannedRun], *, at_once: int, launch: Sequence[str]) -> list[str]:
    """Take the runs, with a bar on a terminal and a line a run elsewhere; on standard error."""
    console = Console(stderr=True)
    going: set[str] = set()
    with Progress(
        TextColumn("[bold]runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[going]}"),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("runs", total=len(runs), going="")

        def tell(planned: PlannedRun, what: str) -> None:
            name = planned.folder.name
            going.discard(name)
            if what == "started":
                going.add(name)
            progress.update(
                task, advance=0 if what == "started" else 1, going=", ".join(sorted(going))
            )
            if not console.is_terminal:
                console.print(f"{what:8} {name}", highlight=False)

        return take(runs, at_once=at_once, tell=tell, launch=launch)


def _kept_bytes(planned: PlannedRun) -> float:
    """What the run keeps of a token for its weight gradients at most, as `gnmr-megatron units` has it; else NaN."""
    parser = run_parser("gnmr-megatron experiment", description="", epilog="")
    try:
        config, _ = parse_run(parser, ["--config", str(planned.folder / "config.yaml")])
    except ConfigError:  # a run of another version: its other figures are still known
        return float("nan")
    table = UnitsTable(config.unit_plans(), config)
    return float(table.as_dict()["totals"]["most_bytes"])


def _write(output: Path, rows: Sequence[RunFigures], table: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    replace_file(output / "results.csv", as_csv(rows).encode())
    replace_file(output / "results.md", table.encode())
