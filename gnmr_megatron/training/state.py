"""Where a run stands: all that resumes besides weights, optimizer and controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainState:
    """Counters of a run, equal on every rank.

    Attributes:
        step: steps done; a skipped step counts.
        consumed_samples: training sequences used; the position in the data.
        consumed_tokens: tokens trained on.
        skipped_in_a_row: steps skipped since the last update.
        train_samples: sequences whose order was planned at the start of the run.
        global_batch_size: sequences a step; gradients scale with it.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_in_a_row: int = 0
    train_samples: int = 0
    global_batch_size: int = 0
