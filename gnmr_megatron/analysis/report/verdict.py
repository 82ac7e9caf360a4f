"""What a run comes to, in sentences that follow from its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gnmr_megatron.analysis.report.figures import (
    PAPER_EXCEEDANCE_PERCENT,
    ControlFigures,
    LossFigures,
)
from gnmr_megatron.analysis.report.history import RunHistory
from gnmr_megatron.analysis.report.spikes import AROUND, Spike
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.observability.console import short_unit


@dataclass(frozen=True)
class Sentence:
    """One finding; `kind` tells whether there is something to do about it."""

    kind: Literal["good", "note", "warning"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a verdict follows from."""

    history: RunHistory
    losses: LossFigures | None
    control: ControlFigures
    settings: ControlConfig
    spikes: Sequence[Spike]

    @property
    def is_paper_rule(self) -> bool:
        """Whether scores are the paper's, so that its numbers can be compared with."""
        return self.settings.policy == "gnmr"


def verdict(found: Findings) -> tuple[Sentence, ...]:
    """The findings in order: how it ended, the loss, what control did, what it cost, and what was survived."""
    sentences = [_end(found)]
    if len(found.history.series):
        for part in (_loss, _recovery, _exceedance, _budget, _spikes, _cost, _faults, _limits):
            sentences.extend(part(found))
    return tuple(sentences)


def _end(found: Findings) -> Sentence:
    history = found.history
    taken = int(history.series.step[-1]) if len(history.series) else 0
    total = history.start.total_steps
    progress = f"{taken:,} of {total:,} steps"
    if history.finish is None:
        still = "either it still goes on, or it ended without a word (a kill, a crash)"
        return Sentence("warning", f"Not finished: {progress} so far; {still}.")
    reason = history.finish.reason
    if reason == "completed":
        return Sentence("good", f"Completed: {progress}.")
    if reason == "diverged":
        why = "losses or gradients were not finite for too many steps in a row"
        return Sentence("warning", f"Diverged after {progress}: {why}.")
    if reason == "signal":
        return Sentence("note", f"Stopped by a signal after {progress}, with a checkpoint.")
    return Sentence("warning", f"Ended by an error ({reason}) after {progress}.")


def _loss(found: Findings) -> Iterator[Sentence]:
    losses = found.losses
    if losses is None:
        yield Sentence("warning", "No step had a finite loss.")
        return
    window = f"means of {losses.window} steps"
    change = f"from {losses.first:.4f} to {losses.last:.4f} ({window})"
    if losses.last >= losses.first:
        yield Sentence("warning", f"The training loss did not fall: it went {change}.")
    else:
        yield Sentence("good", f"The training loss fell {change}.")
        if losses.last - losses.best > 3 * losses.best_deviation:
            best = f"{losses.best:.4f} up to step {losses.best_step:,}"
            yield Sentence("warning", f"It ends clearly above its best, {best}.")
    if losses.not_finite:
        yield Sentence(
            "warning", f"{_count(losses.not_finite, 'step')} had a loss that is not finite."
        )
    if found.history.evaluations:
        last = found.history.evaluations[-1]
        what = f"loss {last.loss:.4f}, perplexity {last.perplexity:.2f}, at step {last.step:,}"
        yield Sentence("note", f"Held-out text: {what}.")
    else:
        yield Sentence("note", "Held-out text was not evaluated.")


def _recovery(found: Findings) -> Iterator[Sentence]:
    control, settings = found.control, found.settings
    if settings.mode == "disabled":
        yield Sentence("note", "Control was off (gnmr.mode: disabled): nothing was measured.")
        return
    if settings.mode == "monitor":
        what = f"it would have selected {_count(control.selected, 'unit-step')}"
        yield Sentence("note", f"Control only watched (gnmr.mode: monitor): {what}.")
        return
    if control.recovered:
        yield _most_recovered(found)
        return
    last = int(found.history.series.step[-1])
    if last <= settings.warmup_steps:
        why = f"the run is still within the {settings.warmup_steps} warm-up steps"
    elif control.over_threshold:
        why = f"{_count(control.over_threshold, 'unit-step')} passed a threshold, but none was given a place"
    elif found.is_paper_rule:
        why = "no unit passed a threshold after the warm-up" + _highest(found)
    else:
        why = f"policy {settings.policy} asked for nothing"
    text = f"Nothing was recovered: {why}. Every step ran on the low path alone."
    yield Sentence("warning", text)


def _highest(found: Findings) -> str:
    """The highest score of the run, where it belongs."""
    riskiest = found.history.riskiest
    if riskiest is None or riskiest[2] > 1:
        return ""
    step, unit, score = riskiest
    return f" (the highest score was {score:.2f}, of {short_unit(unit)} at step {step:,}; above 1 is risky)"


def _most_recovered(found: Findings) -> Sentence:
    control, history = found.control, found.history
    units = Counter(history.recovered.unit.tolist())
    unit, steps = units.most_common(1)[0]
    most = f"{short_unit(history.units[unit])} most often, in {_count(steps, 'step')}"
    share = f"{_percent(control.recovered_percent)} of all"
    text = f"{_count(control.recovered, 'unit-step')} ran on the recovery path, {share}; {most}."
    if len(units) > 1 and 2 * steps > control.recovered:
        return Sentence("warning", f"{text} That one unit has more than half of them.")
    return Sentence("note", text)


def _exceedance(found: Findings) -> Iterator[Sentence]:
    control = found.control
    if found.settings.mode == "disabled" or not control.over_threshold:
        return
    rate = f"{_percent(control.exceedance_percent)} of unit-steps were over a threshold"
    if not found.is_paper_rule:
        yield Sentence("note", f"{rate}; they are those of policy {found.settings.policy}.")
        return
    times = control.exceedance_percent / PAPER_EXCEEDANCE_PERCENT
    paper = f"the paper's {PAPER_EXCEEDANCE_PERCENT} %"
    if times > 5:
        advice = (
            "the thresholds mark everyday noise, not rare events: raise gnmr.alpha and gnmr.beta"
        )
        yield Sentence("warning", f"{rate}, {times:.0f} times {paper}: {advice}.")
    elif times > 2:
        yield Sentence("note", f"{rate}, {times:.1f} times {paper}.")
    else:
        yield Sentence("good", f"{rate}; the paper reports {PAPER_EXCEEDANCE_PERCENT} %.")


def _budget(found: Findings) -> Iterator[Sentence]:
    control, settings = found.control, found.settings
    if settings.mode != "active" or not control.recovered or not found.is_paper_rule:
        return
    if control.full_percent >= 95:
        text = (
            f"The budget was full in {control.full_percent:.0f} % of the steps after the warm-up: "
            "it decided who was recovered, not the thresholds"
        )
        yield Sentence("warning", f"{text}. Raise gnmr.max_recovered, or the thresholds.")
    else:
        yield Sentence(
            "note", f"The budget was full in {_percent(control.full_percent)} of the steps."
        )
    if control.crowded_steps:
        steps = _count(control.crowded_steps, "step")
        yield Sentence(
            "note", f"In {steps} more units were over a threshold than the budget holds."
        )


def _spikes(found: Findings) -> Iterator[Sentence]:
    spikes = found.spikes
    if not spikes:
        yield Sentence("good", "No loss spike.")
        return
    warned = sum(spike.over_before > 0 for spike in spikes)
    caught = sum(spike.over_at > 0 for spike in spikes)
    before = f"in the {AROUND} steps before {warned} of them"
    told = f"a unit was over a threshold {before}, and in the very step of {caught}"
    yield Sentence("warning", f"{_count(len(spikes), 'loss spike')}; {told}.")


def _cost(found: Findings) -> Iterator[Sentence]:
    if found.settings.mode != "disabled":
        share = found.control.time_percent
        kind: Literal["good", "warning"] = "warning" if share > 1 else "good"
        yield Sentence(kind, f"Deciding and switching took {_percent(share)} of the step time.")


def _faults(found: Findings) -> Iterator[Sentence]:
    kinds = Counter(fault.kind for fault in found.history.faults if fault.kind != "loss_spike")
    if kinds:
        told = ", ".join(f"{kind.replace('_', ' ')} ({n})" for kind, n in kinds.most_common())
        yield Sentence("warning", f"Faults that were survived: {told}.")
    skipped = int((~found.history.series.updated).sum())
    if skipped:
        yield Sentence("warning", f"The optimizer skipped {_count(skipped, 'step')}.")


def _limits(found: Findings) -> Iterator[Sentence]:
    if found.settings.mode == "active" and found.control.recovered:
        other = "with the same run under gnmr.policy static_low, over several seeds"
        yield Sentence("note", f"Whether recovery helped, one run cannot tell: compare {other}.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _percent(value: float) -> str:
    """Two significant digits, and never 0 where there is something."""
    if 0 < value < 0.001:
        return "less than 0.001 %"
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %"
