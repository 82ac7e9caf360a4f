"""The processes that torchrun started, among each other: the same software, settings and data, clocks, an all-reduce.

They meet on gloo, so that this works where GPUs do not; the all-reduce then takes NCCL where there are GPUs.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gnmr_megatron.errors import ClusterError
from gnmr_megatron.training.checkup.findings import NODES, Finding
from gnmr_megatron.training.launch_check import differences

ROUNDS = 10
_MEETING = timedelta(seconds=120)
_MOST_LINES = 20
_SMALL, _LARGE = 8, 16 << 20  # bytes of an all-reduce
# torchrun drops a node whose last sign of life is 15 s old by the clock of another one
_SKEW_BREAKS, _SKEW_CONFUSES = 10.0, 1.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one process found.

    Attributes:
        host: its node.
        rank: over all nodes.
        facts: what has to be equal everywhere, by name.
        hardware: what should be.
        findings: about its node; of one process a node.
    """

    host: str
    rank: int
    facts: Mapping[str, str]
    hardware: Mapping[str, str]
    findings: Sequence[Finding] = field(default=())


@dataclass(frozen=True)
class PingPong:
    """One question for the time.

    Attributes:
        asked: when it left, by the own clock.
        told: the other clock's time.
        heard: when the answer came, by the own clock.
    """

    asked: float
    told: float
    heard: float

    @property
    def round_trip(self) -> float:
        """Seconds on the way, there and back."""
        return self.heard - self.asked


def clock_offset(questions: Sequence[PingPong]) -> tuple[float, float]:
    """How far another clock is ahead, and how far that may be off, in seconds.

    The other clock was read somewhere within the round trip, so of the shortest one its middle is taken (Cristian's
    algorithm), and half of it is the uncertainty.
    """
    best = min(questions, key=lambda question: question.round_trip)
    return best.told - (best.asked + best.heard) / 2, best.round_trip / 2


def join() -> None:
    """Meet the other processes.

    Raises:
        ClusterError: they did not all come.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group(backend, timeout=_MEETING)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"the processes did not meet ({reason}); check that all were started, and ports and interfaces"
        ) from error


def leave() -> None:
    """End the meeting when all have what they need; the first process may hold the store."""
    dist.barrier()
    dist.destroy_process_group()


def gather(report: RankReport) -> list[RankReport]:
    """The reports of all ranks, in their order."""
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return reports


def from_first(value: Any) -> Any:
    """The first rank's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def merged_findings(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """The first node's findings, and of the others what is not fine."""
    first = reports[0].host
    for report in reports:
        for finding in report.findings:
            if report.host == first or finding.status in ("warning", "problem"):
                yield replace(finding, node=report.host)


def compare(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Whether all ranks have the same software, settings and data, and GPUs of one kind."""
    hosts = dict.fromkeys(report.host for report in reports)
    who = f"{len(reports)} processes on {len(hosts)} node{'' if len(hosts) == 1 else 's'}"
    known = set.intersection(*(set(report.facts) for report in reports))
    shared = [
        replace(report, facts={name: report.facts[name] for name in report.facts if name in known})
        for report in reports
    ]  # a node whose settings are refused, as its own findings say, tells its versions only
    different = list(differences(_by_node(shared, "facts")))
    for line in different[:_MOST_LINES]:
        yield NODES.problem(
            "same everywhere",
            line,
            "make them equal; a shared file system and one container image do",
        )
    if len(different) > _MOST_LINES:
        more = f"and {len(different) - _MOST_LINES} more"
        yield NODES.problem("same everywhere", more, "make the first ones equal, then look again")
    if not different:
        count = len(known)
        yield NODES.ok("same everywhere", f"{who}: {count} versions, settings and hashes are equal")
    different = list(differences(_by_node(reports, "hardware")))
    for line in different:
        yield NODES.warning(
            "same hardware", line, "the slowest sets the pace; take nodes of one kind"
        )
    if not different:
        yield NODES.ok("same hardware", ", ".join(reports[0].hardware.values()))


def check_clocks(reports: Sequence[RankReport]) -> list[Finding]:
    """Whether the nodes' clocks agree with the first one's; all ranks take part, the first one gets the findings."""
    others = _first_rank_of_each_host(reports)[1:]
    own_rank = dist.get_rank()
    if own_rank in others:
        _answer()
    if own_rank != 0:
        return []
    if not others:
        return [NODES.not_applicable("clocks", "one node has one clock")]
    return [clock_finding(reports[rank].host, *clock_offset(_ask(rank))) for rank in others]


def clock_finding(host: str, offset: float, uncertainty: float) -> Finding:
    """What is said of a clock that is so many seconds ahead of the first node's."""
    check = f"clock of {host}"
    detail = f"{offset * 1e3:+,.2f} ms from the first node's (within {uncertainty * 1e3:.2f} ms)"
    least = max(abs(offset) - uncertainty, 0.0)
    advice = "start chrony or ntpd on all nodes"
    if least > _SKEW_BREAKS:
        return NODES.problem(
            check, f"{detail}; torchrun takes nodes for dead that are 15 s apart", advice
        )
    if least > _SKEW_CONFUSES:
        return NODES.warning(check, f"{detail}; logs and events cannot be put in order", advice)
    return NODES.ok(check, detail)


def check_all_reduce() -> Finding:
    """How long an all-reduce over all ranks takes; all of them take part."""
    world = dist.get_world_size()
    on_gpu = torch.cuda.is_available()
    device, backend = ("cuda", "NCCL") if on_gpu else ("cpu", "gloo")
    check = f"all-reduce over {backend}"
    try:
        small, large = (_all_reduce_seconds(size, device) for size in (_SMALL, _LARGE))
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        return NODES.problem(
            check, f"fails: {reason}", "run with NCCL_DEBUG=INFO, and check interfaces and drivers"
        )
    on_the_wire = 2 * (world - 1) / world * _LARGE  # bytes that each rank sends in a ring
    return NODES.ok(
        check,
        f"{world} ranks: {small * 1e6:,.0f} us for {_SMALL} bytes; {on_the_wire / large / 1e9:.2f} GB/s sent by each "
        f"for {_LARGE >> 20} MiB",
    )


def own_host() -> str:
    """Name of this node."""
    return socket.gethostname()


def _all_reduce_seconds(size: int, device: str) -> float:
    values = torch.ones(size // 4, device=device)
    world, seconds = dist.get_world_size(), []
    for _ in range(ROUNDS):
        values.fill_(1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        total = float(values[-1])  # waits for the device
        seconds.append(time.perf_counter() - started)
        assert total == world, f"the sum of {world} ones is {total}"
    return statistics.median(seconds)


def _ask(rank: int) -> list[PingPong]:
    told, questions = torch.zeros(1, dtype=torch.float64), []
    for _ in range(ROUNDS):
        asked = time.time()
        dist.send(told, rank)
        dist.recv(told, rank)
        questions.append(PingPong(asked, float(told), time.time()))
    return questions


def _answer() -> None:
    clock = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        dist.recv(clock, 0)
        clock.fill_(time.time())
        dist.send(clock, 0)


def _first_rank_of_each_host(reports: Sequence[RankReport]) -> list[int]:
    first: dict[str, int] = {}
    for report in reports:
        first.setdefault(report.host, report.rank)
    return list(first.values())


def _by_node(reports: Sequence[RankReport], what: str) -> list[tuple[str, Mapping[str, str]]]:
    """Name and facts of each node once; of each rank of a node whose ranks differ."""
    of_host: dict[str, list[RankReport]] = {}
    for report in reports:
        of_host.setdefault(report.host, []).append(report)
    named = []
    for host, ranks in of_host.items():
        if all(getattr(rank, what) == getattr(ranks[0], what) for rank in ranks):
            named.append((host, getattr(ranks[0], what)))
        else:
            named += [(f"{host} (rank {rank.rank})", getattr(rank, what)) for rank in ranks]
    return named
