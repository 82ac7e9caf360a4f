"""`gnmr-megatron units`: which path each projection runs on, and what it keeps; without building the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.errors import LayoutError
from gnmr_megatron.models.precision_plan import UnitPlan
from gnmr_megatron.precision.catalog import PathName
from gnmr_megatron.training.config import RunConfig, precision_problems
from gnmr_megatron.training.config_files import parse_run, run_parser

DESCRIPTION = """\
Show the units of a run: shape, the paths each can run on, and the bytes that it keeps of a token for its weight
gradient on either. Reads the settings only: no weights, data or processes.

Bytes are summed over the ranks that share the unit; scales that all tokens share are left out. Layers that are
alike share a line; --json gives each unit its own."""

EPILOG = """\
examples:
  gnmr-megatron units configs/runs/llama2_7b.yaml
  gnmr-megatron units configs/runs/llama2_7b.yaml --precision.first_last_k 2 --json"""


def run(arguments: Sequence[str]) -> int:
    """Print the table of units."""
    parser = run_parser("gnmr-megatron units", description=DESCRIPTION, epilog=EPILOG)
    parser.usage = "%(prog)s CONFIG [--SECTION.KEY VALUE ...] [--json]"
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    config, options = parse_run(parser, arguments)
    problems = list(precision_problems(config))
    if problems:
        raise LayoutError("\n".join(problems))
    table = UnitsTable(config.unit_plans(), config)
    if options.json:
        print(json.dumps(table.as_dict()))
    else:
        table.print()
    return 0


@dataclass(frozen=True)
class UnitsTable:
    """The plans of all projections, for people and for programs."""

    plans: Sequence[UnitPlan]
    config: RunConfig

    def as_dict(self) -> dict[str, Any]:
        """All units, and totals in bytes a token."""
        return {"units": [self._row(plan) for plan in self.plans], "totals": self._totals()}

    def print(self) -> None:
        """A line for each run of layers that are alike."""
        table = Table(box=SIMPLE_HEAD, header_style="bold")
        table.add_column("unit", no_wrap=True)
        for name in ("shape", "low", "recovery"):
            table.add_column(name)
        for name in ("kept: low", "kept: recovery"):
            table.add_column(name, justify="right")
        for first, last in self._alike():
            row = self._row(first)
            layers = f"{first.unit.layer}" + (
                f"..{last.unit.layer}" if last.unit.layer != first.unit.layer else ""
            )
            table.add_row(
                first.unit.id.replace(f".{first.unit.layer}.", f".{layers}.", 1),
                "x".join(map(str, first.unit.shape)),
                first.low,
                "(fixed)" if first.is_fixed else first.recovery,
                f"{row['low_bytes']:,.0f} B",
                f"{row['recovery_bytes']:,.0f} B",
            )
        console = Console(width=None if Console().is_terminal else 140)
        console.print(table)
        totals = self._totals()
        low, exact = totals["low_bytes"], totals["exact_bytes"]
        console.print(
            f"{totals['units']} projections, {totals['recoverable']} recoverable, at most "
            f"{totals['max_recovered']} at once. Kept of a token: {low:,.0f} B on the low paths "
            f"({low / exact:.1%} of {self.config.model.dtype}), {totals['most_bytes']:,.0f} B with the costliest "
            f"{totals['max_recovered']} recovered, {exact:,.0f} B exact.",
            highlight=False,
            soft_wrap=True,
        )

    def _alike(self) -> Iterator[tuple[UnitPlan, UnitPlan]]:
        """First and last plan of each run of layers whose operator has the same paths, by operator."""
        by_operator: dict[str, list[UnitPlan]] = {}
        for plan in self.plans:
            by_operator.setdefault(plan.unit.operator, []).append(plan)
        for plans in by_operator.values():
            start = plans[0]
            for plan, following in zip(plans, [*plans[1:], None], strict=True):
                if following is None or _paths(following) != _paths(start):
                    yield start, plan
                    start = following or start

    def _row(self, plan: UnitPlan) -> dict[str, Any]:
        return {
            "unit": plan.unit.id,
            "shape": list(plan.unit.shape),
            "low": plan.low,
            "recovery": plan.recovery,
            "fixed": plan.is_fixed,
            "low_bytes": self._kept(plan, plan.low),
            "recovery_bytes": self._kept(plan, plan.recovery),
        }

    def _kept(self, plan: UnitPlan, path: PathName) -> float:
        layout = self.config.parallel
        return plan.kept_bytes(
            path,
            self.config.precision,
            tensor_parallel=layout.tensor_model_parallel_size,
            sequence_parallel=layout.sequence_parallel,
        )

    def _totals(self) -> dict[str, Any]:
        rows = [self._row(plan) for plan in self.plans]
        budget = self.config.gnmr.max_recovered
        recoverable = sum(not row["fixed"] for row in rows)
        most = min(max(budget.values()) if isinstance(budget, dict) else budget, recoverable)
        if self.config.gnmr.mode != "active":
            most = 0  # nothing is ever switched
        low = sum(row["low_bytes"] for row in rows)
        extra = sorted((row["recovery_bytes"] - row["low_bytes"] for row in rows), reverse=True)
        exact: PathName = "fp32" if self.config.model.dtype == "fp32" else "bf16"
        return {
            "units": len(rows),
            "recoverable": recoverable,
            "max_recovered": most,
            "low_bytes": low,
            "most_bytes": low + sum(max(more, 0) for more in extra[:most]),
            "exact_bytes": sum(self._kept(plan, exact) for plan in self.plans),
        }


def _paths(plan: UnitPlan) -> tuple[str, str, bool]:
    return plan.low, plan.recovery, plan.is_fixed
