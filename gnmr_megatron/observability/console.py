"""One line an event, for people or for programs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from typing import IO, TextIO

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
    to_line,
)
from gnmr_megatron.observability.live.progress import RunProgress


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


def describe_start(event: StartEvent) -> str:
    """The run, its processes and its controller."""
    parts = [
        f"{event.run}: {describe_layout(event)}",
        f"{event.num_units} units",
        f"policy {event.policy} ({event.mode})",
        f"at most {event.max_recovered} recovered",
    ]
    if event.num_parameters is not None:
        parts.insert(1, describe_size(event.num_parameters))
    return ", ".join(parts)


def describe_layout(event: StartEvent) -> str:
    """`4 processes (TP 2 x PP 2)`."""
    tensor = event.layout.get("tensor_model_parallel_size", 1)
    pipeline = event.layout.get("pipeline_model_parallel_size", 1)
    context = event.layout.get("context_parallel_size", 1)
    sizes = f"TP {tensor} x PP {pipeline}" + (f" x CP {context}" if context > 1 else "")
    return f"{event.world_size} process{'es' if event.world_size > 1 else ''} ({sizes})"


def describe_size(num_parameters: int) -> str:
    """`58.1 M parameters`."""
    return f"{num_parameters / 1e6:,.1f} M parameters"


def describe_fault(event: FaultEvent) -> str:
    """Where and what, with the first units."""
    where = "" if event.rank is None else f" on rank {event.rank}"
    units = ", ".join(short_unit(unit) for unit in event.units[:5])
    if len(event.units) > 5:
        units += f" and {len(event.units) - 5} more"
    return f"step {event.step}{where}: {event.message}{f' ({units})' if units else ''}"


def lines_of(event: Event, progress: RunProgress) -> Iterator[Text]:
    """Words for an event: no line of a decision, two of a resume, one of any other.

    Args:
        event: what happened.
        progress: the run up to this event.
    """
    if isinstance(event, StartEvent):
        yield _line("start", describe_start(event), "bold")
        if event.resumed_from:
            yield _line("resume", f"from {event.resumed_from}", "bold")
    elif isinstance(event, StepEvent):
        yield _step_line(event, progress)
    elif isinstance(event, EvaluationEvent):
        result = f"loss {event.loss:.4f}  perplexity {event.perplexity:.2f}"
        size = f"{event.tokens:,} tokens in {event.seconds:.1f} s"
        yield _line("held-out", f"{result}  {size}", "cyan")
    elif isinstance(event, CheckpointEvent):
        size = f"{event.bytes / 1e6:,.1f} MB in {event.seconds:.1f} s"
        if event.blocked_seconds is not None:
            size += f", training waited {event.blocked_seconds:.2f} s"
        yield _line("checkpoint", f"{event.path}  {size} ({event.kind})", "blue")
    elif isinstance(event, FaultEvent):
        yield _line("fault", describe_fault(event), "red")
    elif isinstance(event, FinishEvent):
        style = "bold green" if event.reason == "completed" else "bold yellow"
        size = f"{event.tokens:,} tokens in {duration(event.seconds)}"
        text = f"{event.reason} at step {event.step}  loss {event.loss:.4f}  {size}"
        yield _line("finish", text, style)


def _step_line(event: StepEvent, progress: RunProgress) -> Text:
    line = Text().append(_position(event.step, progress.total_steps), "bold")
    line.append(f"  eta {duration(progress.eta_seconds):>7}  loss {event.loss:7.4f}")
    line.append(f"  lr {event.learning_rate:.2e}  grad {event.grad_norm:8.3g}")
    line.append(f"  {event.tokens_per_second:9,.0f} tok/s")
    busy = "yellow" if event.recovered else ""
    line.append(f"  recovered {len(event.recovered)}/{progress.max_recovered}", busy)
    if event.riskiest_unit is not None:
        hot = "red" if event.riskiest_score > 1 else ""
        unit = printable(short_unit(event.riskiest_unit))
        line.append(f"  riskiest {unit:8} {event.riskiest_score:5.2f}", hot)
    if not event.updated:
        line.append("  SKIPPED", "red")
    return line


class ConsoleTracker:
    """Prints to a terminal in colour, elsewhere in plain lines that never wrap.

    Args:
        log_interval: print every so many steps, and the first and the last.
        file: where to print; standard output by default.
    """

    def __init__(self, *, log_interval: int = 1, file: TextIO | None = None) -> None:
        self._console = _Lines(
            file=file,
            soft_wrap=True,
            highlight=False,
            # what a cluster sets in FORCE_COLOR must not bring escape codes into its log files
            force_terminal=(file or sys.stdout).isatty(),
            force_jupyter=False,
        )
        self._log_interval = log_interval
        self._progress = RunProgress()

    def record(self, event: Event) -> None:
        """Print the event's line."""
        self.print(self.lines_of(event))

    def lines_of(self, event: Event) -> list[Text]:
        """What `record` would print, not printed."""
        self._progress.add(event)
        return list(lines_of(event, self._progress)) if self._is_due(event) else []

    def print(self, lines: Iterable[Text]) -> None:
        """Print lines of `lines_of`."""
        for line in lines:
            self._console.print(line)

    def say(self, what: str, text: str) -> None:
        """Print a line that is about no event."""
        self.print([_line(what, text, "yellow")])

    def close(self) -> None:
        """Nothing is held back."""

    def _is_due(self, event: Event) -> bool:
        if not isinstance(event, StepEvent) or event.step % self._log_interval == 0:
            return True
        return event.step in (self._progress.first_step, self._progress.total_steps)


class JsonTracker:
    """Prints each event as its line of events.jsonl.

    Args:
        file: where to print; standard output by default.
    """

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout

    def record(self, event: Event) -> None:
        """Print the line, at once."""
        try:
            self._file.write(to_line(event))
            self._file.flush()
        except BrokenPipeError:
            _discard_output(self._file)
            raise

    def close(self) -> None:
        """Nothing is held back."""


class _Lines(Console):
    """A console whose reader may go away, as with `| head`, without the end of the process that rich has in mind."""

    def on_broken_pipe(self) -> None:
        """Let what others print, and Python's last flush, go nowhere; the tracker fails alone."""
        _discard_output(self.file)
        raise BrokenPipeError("nobody reads the output any more")


def _discard_output(file: IO[str]) -> None:
    if file is sys.stdout:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _line(what: str, text: str, style: str) -> Text:
    return Text().append(f"{what:10} ", style).append(printable(text))


def _position(step: int, total: int) -> str:
    if not total:
        return f"step {step}"
    return f"step {step:{len(str(total))}}/{total} {step / total:4.0%}"


def printable(text: str) -> str:
    """On one line, without control characters: messages come from anywhere."""
    line = " ".join(text.splitlines()).replace("\t", " ")
    return "".join(sign if sign.isprintable() else "?" for sign in line)
