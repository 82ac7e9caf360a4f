"""One line a step for people."""

from __future__ import annotations

import math
from datetime import timedelta
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
    if parts[:2] == ["decoder", "layers"]:
        return f"L{parts[2]}.{parts[-1].removeprefix('linear_')}"
    return unit


class ConsoleTracker:
    """Prints to a terminal in colour, elsewhere in plain lines that never wrap.

    Args:
        log_interval: print every so many steps.
        file: where to print; standard output by default.
    """

    def __init__(self, *, log_interval: int = 1, file: TextIO | None = None) -> None:
        self._console = Console(file=file, soft_wrap=True, highlight=False)
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
            self._line(
                "held-out", f"loss {event.loss:.4f}  perplexity {event.perplexity:.2f}", "cyan"
            )
        elif isinstance(event, CheckpointEvent):
            size = f"{event.bytes / 1e6:.1f} MB in {event.seconds:.1f} s"
            self._line("checkpoint", f"{event.path}  {size} ({event.kind})", "blue")
        elif isinstance(event, FaultEvent):
            where = "" if event.rank is None else f" on rank {event.rank}"
            units = ", ".join(short_unit(unit) for unit in event.units[:5])
            self._line(
                "fault",
                f"step {event.step}{where}: {event.message}{f' ({units})' if units else ''}",
                "red",
            )
        elif isinstance(event, FinishEvent):
            self._line("finish", f"{event.reason} at step {event.step}", "bold")

    def close(self) -> None:
        """Nothing is held back."""

    def _start(self, event: StartEvent) -> None:
        self._first_step, self._total_steps = event.step, event.total_steps
        self._max_recovered = event.max_recovered
        sizes = {
            "TP": event.layout.get("tensor_model_parallel_size", 1),
            "PP": event.layout.get("pipeline_model_parallel_size", 1),
        }
        layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
        what = f"{event.run}: {event.world_size} processes ({layout}), {event.num_units} units"
        self._line(
            "start",
            f"{what}, policy {event.policy} ({event.mode}), at most {event.max_recovered} recovered",
            "bold",
        )
        if event.resumed_from:
            self._line("resume", f"from {event.resumed_from}", "bold")

    def _step(self, event: StepEvent) -> None:
        if event.step > self._first_step:  # the first step pays for warming up
            before = event.step_seconds if math.isnan(self._step_seconds) else self._step_seconds
            self._step_seconds = SMOOTHING * before + (1 - SMOOTHING) * event.step_seconds
        if event.step % self._log_interval and event.step not in (
            self._first_step,
            self._total_steps,
        ):
            return
        width = len(str(self._total_steps))
        line = Text()
        line.append(
            f"step {event.step:{width}}/{self._total_steps} {event.step / self._total_steps:4.0%}",
            "bold",
        )
        line.append(
            f"  eta {self._eta(event)}  loss {event.loss:7.4f}  lr {event.learning_rate:.2e}"
        )
        line.append(f"  grad {event.grad_norm:8.3g}  {event.tokens_per_second:7,.0f} tok/s  ")
        busy = "yellow" if event.recovered else ""
        line.append(f"recovered {len(event.recovered)}/{self._max_recovered}", busy)
        if event.riskiest_unit is not None:
            hot = "red" if event.riskiest_score > 1 else ""
            line.append(
                f"  riskiest {short_unit(event.riskiest_unit):8} {event.riskiest_score:5.2f}", hot
            )
        if not event.updated:
            line.append("  SKIPPED", "red")
        self._console.print(line)

    def _eta(self, event: StepEvent) -> str:
        seconds = (self._total_steps - event.step) * self._step_seconds
        return (
            "  -  " if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))[-8:].lstrip()
        )

    def _line(self, what: str, text: str, style: str) -> None:
        self._console.print(Text(f"{what:10} ", style).append(text, ""))
