"""The check-up as a whole: which checks, in which order, of this process or of all that torchrun started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gnmr_megatron.errors import GnmrError
from gnmr_megatron.precision.catalog import PATHS, PathName
from gnmr_megatron.training.checkup.devices import check_devices, gpu_names
from gnmr_megatron.training.checkup.findings import NODES, RUN, Finding, Report, Topic
from gnmr_megatron.training.checkup.imports import describe, import_problem
from gnmr_megatron.training.checkup.network import check_names, check_ports, check_wandb
from gnmr_megatron.training.checkup.precision import check_precision
from gnmr_megatron.training.checkup.resources import check_machine, check_needs
from gnmr_megatron.training.checkup.run_settings import check_data, check_folders, check_settings
from gnmr_megatron.training.checkup.versions import check_versions
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.launch_plan import LaunchPlan

UNREADABLE = "settings cannot be read"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is to be checked.

    Attributes:
        config: settings of the run; None for the machine alone.
        unreadable: why settings that were given could not be read.
        nodes: of the run.
        nproc_per_node: processes of each node; None for what the layout needs.
        endpoint: HOST:PORT at which processes meet; None for torchrun's default.
    """

    config: RunConfig | None
    unreadable: str | None = None
    nodes: int = 1
    nproc_per_node: int | None = None
    endpoint: str | None = None

    @property
    def plan(self) -> LaunchPlan | None:
        """Where the run's processes go."""
        if self.config is None:
            return None
        nproc = self.nproc_per_node or -(-self.config.parallel.default_world_size // self.nodes)
        return LaunchPlan(self.config, self.nodes, nproc, ())

    @property
    def wanted_paths(self) -> set[PathName]:
        """Precision paths that the run takes; those of the settings where overrides do not fit."""
        if self.config is None:
            return set()
        try:
            plans = self.config.unit_plans()
        except GnmrError:  # told among the settings
            return {self.config.precision.low, self.config.precision.recovery}
        return {path for plan in plans for path in plan.paths}


def check_up(subject: Subject) -> Report:
    """Look at everything; under torchrun all processes take part and get the same report."""
    if "RANK" not in os.environ:
        host = socket.gethostname()
        findings = [replace(finding, node=host) for finding in _node_findings(subject)]
        return Report(findings=findings, nodes=[host])
    return _check_up_together(_of_this_world(subject))


def _of_this_world(subject: Subject) -> Subject:
    """The subject with the numbers that torchrun tells."""
    nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return replace(subject, nodes=int(os.environ["WORLD_SIZE"]) // nproc, nproc_per_node=nproc)


def _node_findings(subject: Subject, *, ports: bool = True) -> Iterator[Finding]:
    """Everything about this node and the run on it."""
    plan, config, wanted = subject.plan, subject.config, subject.wanted_paths
    needs_te = any(PATHS[path].family == "te" for path in wanted)
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("versions", lambda: check_versions(needs_te=needs_te)),
        ("devices", lambda: check_devices(processes=plan.nproc_per_node if plan else None)),
        (
            "precision",
            lambda: check_precision(wanted, fuse=config.precision.fuse if config else None),
        ),
        ("memory and disk", check_machine),
        ("network", lambda: check_names(os.environ)),
        ("network", lambda: check_wandb(config.tracking if config else None)),
    ]
    if ports:
        checks.append(
            ("network", lambda: check_ports(subject.endpoint, nodes=subject.nodes)),
        )
    checks.append(("run", lambda: _run_findings(subject)))
    for topic, check in checks:
        yield from guarded(topic, check)


def _run_findings(subject: Subject) -> Iterator[Finding]:
    plan = subject.plan
    if subject.unreadable is not None:
        for line in subject.unreadable.splitlines():
            yield RUN.refused(UNREADABLE, line)
    elif plan is None:
        yield RUN.not_applicable("settings", "none were given", "give a run with --config FILE")
    if plan is None:
        return
    data = check_data(plan.config)
    settings = list(
        check_settings(plan.config, world_size=plan.world_size, vocab_size=data.vocab_size)
    )
    yield from (*settings, *data.findings, *check_folders(plan.config))
    if data.vocab_size is not None and all(finding.status == "ok" for finding in settings):
        yield from check_needs(plan, vocab_size=data.vocab_size)


def guarded(topic: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; one more where it breaks, which on a broken machine it may."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001  # a check-up goes on with the next check
        yield Topic(topic).warning(
            "check-up", f"a check of {topic} broke: {describe(error)}", "report it, with this line"
        )


def _check_up_together(subject: Subject) -> Report:
    host, rank = socket.gethostname(), int(os.environ["RANK"])
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    # ports are taken by torchrun itself, and that processes meet is the better proof
    findings = list(
        _node_findings(subject, ports=False) if is_first_of_node else _own_troubles(subject)
    )
    problem = import_problem("torch") or import_problem("gnmr_megatron.training.checkup.nodes")
    if problem is None:
        try:
            return _meet(subject, host, rank, findings)
        except GnmrError as error:
            problem = str(error)
    alone = NODES.problem(
        "meeting", problem, "until this is mended, nothing is known of the others"
    )
    return Report(findings=[replace(f, node=host) for f in (*findings, alone)], nodes=[host])


def _own_troubles(subject: Subject) -> Iterator[Finding]:
    """What a process finds about itself where another one looks at the node."""
    if subject.unreadable is not None:
        yield from _run_findings(subject)


def _meet(subject: Subject, host: str, rank: int, findings: Sequence[Finding]) -> Report:
    from gnmr_megatron.training.checkup import nodes

    own = nodes.RankReport(
        host=host,
        rank=rank,
        facts=_facts(subject),
        hardware={"GPUs": ", ".join(gpu_names()) or "no GPU"},
        findings=findings,
    )
    nodes.join()
    reports = nodes.gather(own)
    clocks = nodes.check_clocks(reports)
    together = nodes.check_all_reduce()
    report = Report(
        findings=[*nodes.merged_findings(reports), *nodes.compare(reports), *clocks, together],
        nodes=list(dict.fromkeys(report.host for report in reports)),
        processes=len(reports),
    )
    report = nodes.from_first(report)
    nodes.leave()
    return report


def _facts(subject: Subject) -> dict[str, str]:
    """What has to be equal on all nodes."""
    from gnmr_megatron.training.launch_check import node_facts, version_facts

    plan = subject.plan
    if plan is None:
        return version_facts()
    try:
        return node_facts(plan.config, world_size=plan.world_size)
    except (GnmrError, OSError):  # told among the findings
        return version_facts()
