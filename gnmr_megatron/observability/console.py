"""One line a step for people."""

from __future__ import annotations

import math
import os
import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

from gnmr_megatron.observability.events import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FaultEvent,
    FinishEvent,
    StartEvent,
    StepEvent,
)

SMOOTHING = 0.9  # of the step time that the ETA is computed from


def short_unit(unit: str) -> str:
    """`decoder.layers.3.mlp.linear_fc1` as `L3.fc1`."""
    parts = unit.split(".")
    if len(parts) > 3 and parts[:2] == ["decoder", "layers"]:
        return f"L{parts[2]}.{parts[-1].removeprefix('linear_')}"
    return unit


def duration(seconds: float) -> str:
    """`0:00:18`, `13:46:38`, from a day on `11d 13:46`; `-` where it isn't known."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}" if days else f"{hour}:{minute:02}:{second:02}"


class ConsoleTracker:
    """Prints to a terminal in colour, elsewhere in plain lines that never wrap.

    Args:
        log_interval: print every so many steps, and the first and the last.
        file: where to print; standard output by default.
    """

    def __init__(self, *, log_interval: int = 1, file: TextIO | None = None) -> None:
        self._console = _Lines(file=file, soft_wrap=True, highlight=False)
        self._log_interval = log_interval
        self._max_recovered = self._total_steps = 0
        self._first_step = 0
        self._step_seconds = math.nan

    def record(self, event: Event) -> None:
        """Print the event's line."""
        if isinstance(event, StartEvent):
            self._start(event)
        elif isinstance(event, StepEvent):
            self._step(event)
        elif isinstance(event, EvaluationEvent):
            result = f"loss {event.loss:.4f}  perplexity {event.perplexity:.2f}"
            size = f"{event.tokens:,} tokens in {event.seconds:.1f} s"
            self._line("held-out", f"{result}  {size}", "cyan")
        elif isinstance(event, CheckpointEvent):
            size = f"{event.bytes / 1e6:,.1f} MB in {event.seconds:.1f} s"
            if event.blocked_seconds is not None:
                size += f", training waited {event.blocked_seconds:.2f} s"
            self._line("checkpoint", f"{event.path}  {size} ({event.kind})", "blue")
        elif isinstance(event, FaultEvent):
            self._fault(event)
        elif isinstance(event, FinishEvent):
            style = "bold green" if event.reason == "completed" else "bold yellow"
            size = f"{event.tokens:,} tokens in {duration(event.seconds)}"
            text = f"{event.reason} at step {event.step}  loss {event.loss:.4f}  {size}"
            self._line("finish", text, style)

    def close(self) -> None:
        """Nothing is held back."""

    def _start(self, event: StartEvent) -> None:
        self._first_step, self._total_steps = event.step, event.total_steps
        self._max_recovered, self._step_seconds = event.max_recovered, math.nan
        tensor = event.layout.get("tensor_model_parallel_size", 1)
        pipeline = event.layout.get("pipeline_model_parallel_size", 1)
        context = event.layout.get("context_parallel_size", 1)
        sizes = f"TP {tensor} x PP {pipeline}" + (f" x CP {context}" if context > 1 else "")
        processes = f"{event.world_size} process{'es' if event.world_size > 1 else ''}"
        parts = [
            f"{event.run}: {processes} ({sizes})",
            f"{event.num_units} units",
            f"policy {event.policy} ({event.mode})",
            f"at most {event.max_recovered} recovered",
        ]
        if event.num_parameters is not None:
            parts.insert(1, f"{event.num_parameters / 1e6:,.1f} M parameters")
        self._line("start", ", ".join(parts), "bold")
        if event.resumed_from:
            self._line("resume", f"from {event.resumed_from}", "bold")

    def _step(self, event: StepEvent) -> None:
        if event.step > self._first_step:  # the first step pays for warming up
            before = event.step_seconds if math.isnan(self._step_seconds) else self._step_seconds
            self._step_seconds = SMOOTHING * before + (1 - SMOOTHING) * event.step_seconds
        total = event.total_steps or self._total_steps
        if event.step % self._log_interval == 0 or event.step in (self._first_step, total):
            self._console.print(self._step_line(event, total))

    def _step_line(self, event: StepEvent, total: int) -> Text:
        eta = duration((total - event.step) * self._step_seconds) if total else "-"
        budget = self._max_recovered if event.max_recovered is None else event.max_recovered
        line = Text().append(_progress(event.step, total), "bold")
        line.append(f"  eta {eta:>7}  loss {event.loss:7.4f}  lr {event.learning_rate:.2e}")
        line.append(f"  grad {event.grad_norm:8.3g}  {event.tokens_per_second:9,.0f} tok/s")
        busy = "yellow" if event.recovered else ""
        line.append(f"  recovered {len(event.recovered)}/{budget}", busy)
        if event.riskiest_unit is not None:
            hot = "red" if event.riskiest_score > 1 else ""
            unit = _printable(short_unit(event.riskiest_unit))
            line.append(f"  riskiest {unit:8} {event.riskiest_score:5.2f}", hot)
        if not event.updated:
            line.append("  SKIPPED", "red")
        return line

    def _fault(self, event: FaultEvent) -> None:
        where = "" if event.rank is None else f" on rank {event.rank}"
        units = ", ".join(short_unit(unit) for unit in event.units[:5])
        if len(event.units) > 5:
            units += f" and {len(event.units) - 5} more"
        what = f"step {event.step}{where}: {event.message}{f' ({units})' if units else ''}"
        self._line("fault", what, "red")

    def _line(self, what: str, text: str, style: str) -> None:
        self._console.print(Text().append(f"{what:10} ", style).append(_printable(text)))


class _Lines(Console):
    """A console whose reader may go away, as with `| head`, without the end of the process that rich has in mind."""

    def on_broken_pipe(self) -> None:
        """Let what others print, and Python's last flush, go nowhere; the tracker fails alone."""
        if self.file is sys.stdout:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        raise BrokenPipeError("nobody reads the output any more")


def _progress(step: int, total: int) -> str:
    if not total:
        return f"step {step}"
    return f"step {step:{len(str(total))}}/{total} {step / total:4.0%}"


def _printable(text: str) -> str:
    """On one line, without control characters: messages come from anywhere."""
    line = " ".join(text.splitlines()).replace("\t", " ")
    return "".join(sign if sign.isprintable() else "?" for sign in line)
