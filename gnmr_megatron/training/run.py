"""A run from settings to summary, on one rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from gnmr_megatron.distributed.process_groups import stop_process_groups
from gnmr_megatron.observability.summary import RunSummary, as_dict, render, summarize
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.setup import set_up


@dataclass(frozen=True)
class RunReport:
    """What a finished run tells: its summary."""

    summary: RunSummary

    def as_text(self) -> str:
        """For people: the summary, and what to do with the run."""
        run = self.summary.run
        suggestions = [
            f"gnmr-megatron summary {run} --json",
            f"gnmr-megatron train --config {run}/config.yaml --gnmr.alpha 2.0 --gnmr.max_recovered 4",
            f"gnmr-megatron train --config {run}/config.yaml --gnmr.mode monitor",
        ]
        if self.summary.finished == "signal":
            suggestions.insert(0, f"gnmr-megatron train --resume {run}")
        elif any(Path(run).glob("wandb/offline-run-*")):
            suggestions.append(f"wandb sync {run}/wandb/offline-run-*")
        first, *others = suggestions
        return "\n".join(
            [render(self.summary), f"try next   {first}", *(f"{'':10} {line}" for line in others)]
        )

    def as_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(as_dict(self.summary))


def train(config: RunConfig, *, quiet: bool = False) -> RunReport | None:
    """Train to the end, or until a signal asks to stop.

    Args:
        config: all settings.
        quiet: no console lines, whatever `tracking.console` says.

    Returns:
        The report on rank 0, None on others.

    Raises:
        GnmrError: alike on every rank.
    """
    if quiet:
        config = replace(config, tracking=replace(config.tracking, console="quiet"))
    trainer = set_up(config)
    try:
        trainer.train()
    finally:
        trainer.recorder.close()  # no collectives: others may not answer any more
    stop_process_groups()
    folder = trainer.recorder.folder
    return None if folder is None else RunReport(summarize(folder))
