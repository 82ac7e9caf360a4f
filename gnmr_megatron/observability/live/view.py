"""The rows that show a run, for any size of terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from gnmr_megatron.observability.console import (
    describe_fault,
    describe_layout,
    describe_size,
    duration,
    printable,
    short_unit,
)
from gnmr_megatron.observability.live.history import sparkline
from gnmr_megatron.observability.live.progress import RunProgress
from gnmr_megatron.observability.live.unit_risks import UnitRisk

WIDEST = 100  # beyond it, rows are harder to read, not easier
RISKIEST = 4
MOST_NAMES = 4
LABEL = 11
BAR_TOP = 2.0  # score at the end of a bar; that of 1 is in the middle
LESS_THAN_EVERYTHING = 9


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is shown: the run, its riskiest units, and when."""

    progress: RunProgress
    risks: Sequence[UnitRisk] = field(default=())
    now: float


@dataclass(frozen=True)
class _Row:
    """A row, and its place in the order in which rows go when the terminal is too low: highest first."""

    dispensable: int
    text: Text


def render(seen: Snapshot, *, width: int, height: int) -> list[Text]:
    """At most `height` rows, none wider than `width`; of two calls of one size the same number.

    The progress bar stays to the last; blank rows, single units and the title go first.
    """
    width = min(width, WIDEST)
    rows = [
        _Row(6, _title(seen.progress, width)),
        _Row(0, _progress_row(seen, width)),
        _Row(LESS_THAN_EVERYTHING, Text()),
        _Row(1, _loss_row(seen.progress, width)),
        _Row(3, _held_out_row(seen.progress)),
        _Row(2, _gradient_row(seen.progress, width)),
        _Row(4, _speed_row(seen.progress)),
        _Row(LESS_THAN_EVERYTHING, Text()),
        _Row(2, _recovered_row(seen.progress)),
        *_risk_rows(seen, width),
        _Row(7, _control_row(seen.progress)),
        _Row(LESS_THAN_EVERYTHING, Text()),
        _Row(5, _checkpoint_row(seen.progress)),
        _Row(4, _fault_row(seen.progress)),
    ]
    while len(rows) > max(height, 1):
        rows.remove(max(reversed(rows), key=lambda row: row.dispensable))
    for row in rows:
        row.text.rstrip()
        row.text.truncate(width, overflow="ellipsis")
    return [row.text for row in rows]


def _title(progress: RunProgress, width: int) -> Text:
    start = progress.start
    if start is None:
        return Text("waiting for the run to start", "dim")
    parts = [f"{start.policy} ({start.mode})", f"{start.num_units} units", describe_layout(start)]
    if start.num_parameters is not None:
        parts.insert(1, describe_size(start.num_parameters))
    name = printable(start.run)
    while parts and len(name) + 3 + len("  ".join(parts)) > width:
        parts.pop()
    return Text().append(name, "bold").append("   " + "  ".join(parts), "dim")


def _progress_row(seen: Snapshot, width: int) -> Text:
    progress = seen.progress
    step, total = progress.step, progress.total_steps
    share = step / total if total else 0.0
    where = f"  step {step:,}/{total:,}  {share:4.0%}" if total else f"  step {step:,}"
    state, style = _state(seen)
    text = Text()
    text.append_text(_bar(share, max(width - len(where) - len(state), 4), "green"))
    return text.append(where, "bold").append(state, style)


def _state(seen: Snapshot) -> tuple[str, str]:
    progress, finish = seen.progress, seen.progress.finish
    if finish is not None:
        if finish.reason == "completed":
            return f"  completed in {duration(finish.seconds)}", "bold green"
        return (
            f"  ended ({printable(finish.reason)}) after {duration(finish.seconds)}",
            "bold yellow",
        )
    silent = progress.silent_seconds(seen.now)
    if silent is not None:
        return f"  no step for {duration(silent)}", "bold yellow"
    return f"  eta {duration(progress.eta_seconds):>7}", ""


def _loss_row(progress: RunProgress, width: int) -> Text:
    last = progress.last
    value = f"{last.loss:8.4f}" if last else f"{'-':>8}"
    return _curve("loss", value, progress.losses.columns(_curve_width(width)), "all steps", "cyan")


def _gradient_row(progress: RunProgress, width: int) -> Text:
    last = progress.last
    value = f"{last.grad_norm:8.3g}" if last else f"{'-':>8}"
    norms = [event.grad_norm for event in progress.recent][-_curve_width(width) :]
    row = _curve("gradient", value, norms, f"last {len(norms)}", "blue")
    if last is not None and not last.updated:
        row.append("  SKIPPED", "bold red")
    return row


def _curve_width(width: int) -> int:
    return max(min(width - LABEL - 8 - 2 - 11, 60), 4)


def _curve(label: str, value: str, points: Sequence[float], span: str, style: str) -> Text:
    row = _labelled(label).append(value, "bold")
    return row.append("  " + sparkline(points), style).append(f"  {span}" if points else "", "dim")


def _held_out_row(progress: RunProgress) -> Text:
    row, evaluation = _labelled("held-out"), progress.evaluation
    if evaluation is None:
        return row.append(f"{'-':>8}")
    row.append(f"{evaluation.loss:8.4f}", "bold")
    return row.append(f"  perplexity {evaluation.perplexity:.2f} at step {evaluation.step:,}")


def _speed_row(progress: RunProgress) -> Text:
    row, last = _labelled("speed"), progress.last
    if last is None:
        return row.append(f"{'-':>8}")
    row.append(f"{last.tokens_per_second:8,.0f}", "bold").append(" tok/s")
    return row.append(f"  {last.step_seconds:.3g} s a step  lr {last.learning_rate:.2e}")


def _recovered_row(progress: RunProgress) -> Text:
    row, last = _labelled("recovered"), progress.last
    if last is None:
        return row.append(f"{'-':>8}")
    now = f"{len(last.recovered)}/{progress.max_recovered}"
    row.append(f"{now:>8}", "bold yellow" if last.recovered else "bold")
    names = ", ".join(printable(short_unit(unit)) for unit in last.recovered[:MOST_NAMES])
    more = len(last.recovered) - MOST_NAMES
    row.append(f"  {names or 'none now'}" + (f" and {more} more" if more > 0 else ""))
    if last.over_threshold:
        row.append(f"  ({last.over_threshold} over a threshold)", "red")
    return row


def _risk_rows(seen: Snapshot, width: int) -> list[_Row]:
    """Always as many rows as the run may need: scores of all units are known under the paper's rule only."""
    start = seen.progress.start
    is_known = start is not None and start.policy == "gnmr" and start.control is not None
    most = min(RISKIEST, start.num_units) if start is not None and is_known else 1
    name_width = max((len(short_unit(risk.unit)) for risk in seen.risks), default=0)
    rows = []
    for place in range(max(most, 1)):
        row = _labelled("riskiest" if place == 0 else "")
        if place < len(seen.risks):
            row.append_text(_risk(seen.risks[place], name_width, width - LABEL))
        elif place == 0:
            row.append(f"{'-':>8}")
        rows.append(_Row(place + 4 if place else 3, row))
    return rows


def _risk(risk: UnitRisk, name_width: int, width: int) -> Text:
    is_over = risk.score > 1
    style = "red" if is_over else "green"
    text = Text().append(f"{risk.score:8.2f}", "bold red" if is_over else "bold")
    text.append(f"  {printable(short_unit(risk.unit)):{name_width}}  ")
    room = width - len(text) - len("  recovered")
    text.append_text(_score_bar(risk.score, max(min(room, 40), 5), style))
    if risk.is_recovered:
        return text.append("  recovered", "yellow")
    return text.append("  next" if risk.is_selected else "", "yellow")


def _score_bar(score: float, width: int, style: str) -> Text:
    """A bar whose middle, marked, is a score of 1; what goes beyond its end ends in an arrow."""
    width -= (width + 1) % 2  # odd, so that there is a middle
    middle = width // 2
    share = 0.0 if math.isnan(score) else min(max(score / BAR_TOP, 0.0), 1.0)
    filled = round(share * width)
    signs = ["━"] * filled + [" "] * (width - filled)
    if score > BAR_TOP:
        signs[-1] = "▶"
    text = Text("".join(signs), style)
    mark = Text("╋" if filled > middle else "│", style if filled > middle else "dim")
    return text[:middle].append_text(mark).append_text(text[middle + 1 :])


def _control_row(progress: RunProgress) -> Text:
    row = _labelled("control")
    if math.isnan(progress.control_percent):
        return row.append(f"{'-':>8}")
    row.append(f"{progress.control_percent:8.3f}", "bold")
    return row.append(f" % of the time of the last {len(progress.recent)} steps")


def _checkpoint_row(progress: RunProgress) -> Text:
    row, saved = _labelled("checkpoint"), progress.checkpoint
    if saved is None:
        return row.append(f"{'-':>8}")
    row.append(f"{saved.step:8,}", "bold").append(f"  {saved.bytes / 1e6:,.1f} MB")
    return row.append(f" in {saved.seconds:.1f} s  ").append(printable(saved.path), "dim")


def _fault_row(progress: RunProgress) -> Text:
    row, fault = _labelled("faults"), progress.fault
    row.append(f"{progress.faults:8,}", "bold red" if fault else "bold")
    return row.append(f"  {printable(describe_fault(fault))}", "red") if fault else row


def _labelled(label: str) -> Text:
    return Text().append(f"{label:{LABEL}}", "dim")


def _bar(share: float, width: int, style: str) -> Text:
    filled = min(int(share * width), width)
    return Text().append("━" * filled, style).append("─" * (width - filled), "dim")
