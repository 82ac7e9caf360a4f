"""What a check-up finds: one line each, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "problem", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: group that it is shown in.
        check: what was looked at.
        status: `problem` where something that is required is broken.
        detail: what was found.
        advice: what to do; empty where there is nothing to do.
        node: host on which it was found; empty for what concerns all of them.
    """

    topic: str
    check: str
    status: Status
    detail: str
    advice: str = ""
    node: str = ""


@dataclass(frozen=True)
class Topic:
    """Makes the findings of one group.

    Attributes:
        name: as it is shown.
    """

    name: str

    def ok(self, check: str, detail: str) -> Finding:
        """Fine."""
        return self._finding(check, "ok", detail, "")

    def not_applicable(self, check: str, detail: str, advice: str = "") -> Finding:
        """Nothing that is needed here."""
        return self._finding(check, "not applicable", detail, advice)

    def warning(self, check: str, detail: str, advice: str) -> Finding:
        """A run starts, but may suffer."""
        return self._finding(check, "warning", detail, advice)

    def problem(self, check: str, detail: str, advice: str) -> Finding:
        """A run fails."""
        return self._finding(check, "problem", detail, advice)

    def refused(self, check: str, message: str) -> Finding:
        """A problem as an error of ours tells it: what is wrong; what to do."""
        detail, _, advice = message.partition("; ")
        return self.problem(check, detail, advice or "correct it")

    def _finding(self, check: str, status: Status, detail: str, advice: str) -> Finding:
        return Finding(topic=self.name, check=check, status=status, detail=detail, advice=advice)


VERSIONS = Topic("versions")
DEVICES = Topic("devices")
PRECISION = Topic("precision")
RESOURCES = Topic("memory and disk")
NETWORK = Topic("network")
RUN = Topic("run")
NODES = Topic("nodes")


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings of a check-up.

    Attributes:
        findings: in the order of the topics.
        nodes: hosts that took part.
        processes: that took part.
    """

    findings: Sequence[Finding]
    nodes: Sequence[str]
    processes: int = 1

    @property
    def counts(self) -> dict[Status, int]:
        """Findings of each status."""
        found = Counter(finding.status for finding in self.findings)
        statuses: tuple[Status, ...] = ("ok", "warning", "problem", "not applicable")
        return {status: found[status] for status in statuses}

    @property
    def is_ready(self) -> bool:
        """Whether nothing that is required is broken."""
        return self.counts["problem"] == 0

    @property
    def sentence(self) -> str:
        """The whole in one sentence."""
        warnings = self.counts["warning"]
        also = f", {_number(warnings, 'warning')}" if warnings else ""
        if self.is_ready:
            return f"Ready: nothing that is required is broken{also}."
        broken = dict.fromkeys(f.check for f in self.findings if f.status == "problem")
        return (
            f"Not ready: {_number(self.counts['problem'], 'problem')} ({', '.join(broken)}){also}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ready": self.is_ready,
            "sentence": self.sentence,
            "nodes": list(self.nodes),
            "processes": self.processes,
            "counts": self.counts,
            "findings": [asdict(finding) for finding in self.findings],
        }


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
