"""Where a run is shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gnmr_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Console, Weights & Biases and TensorBoard; the run folder is always written.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    console: Literal["auto", "lines", "quiet", "json"] = "auto"
    """What the first rank prints. `lines`: one line a step; `json`: the lines of events.jsonl and nothing else;
    `quiet`: nothing but errors and the summary; `auto`: a live view on a terminal, `lines` elsewhere."""

    log_interval: int = 1
    """Console line every so many steps; the files get every step."""

    wandb_mode: Literal["online", "offline", "disabled"] = "offline"
    """`offline` writes W&B files into the run folder, for `wandb sync` later."""

    wandb_project: str = "gnmr-megatron"
    """W&B project."""

    wandb_entity: str | None = None
    """W&B team or user; null for the account's default."""

    wandb_name: str | None = None
    """Name of the run on W&B; null for that of the run folder."""

    wandb_tags: list[str] = field(default_factory=list)
    """W&B tags of the run."""

    wandb_table_interval: int = 100
    """Send the table of recovery decisions, the heat map and the bar charts every so many steps, and at the end.

    Long runs send them less often: W&B shows the newest 100 parts of a table."""

    wandb_checkpoints: bool = False
    """Log each checkpoint as a W&B artifact that says where it lies; its files are not uploaded."""

    wandb_report: bool = False
    """Upload the run's HTML report as a W&B artifact at the end."""

    tensorboard: bool = False
    """Write TensorBoard files into the run folder, with the scalars of W&B under the same names."""

    unit_metrics: list[str] = field(default_factory=list)
    """Globs of units whose GNMR and delta-GNMR W&B and TensorBoard get at each step, as gnmr/UNIT and delta_gnmr/UNIT.

    For all units: `["*"]`."""

    def __post_init__(self) -> None:
        for key in ("log_interval", "wandb_table_interval"):
            if getattr(self, key) < 1:
                raise ConfigError(f"tracking.{key}: {getattr(self, key)} must be at least 1")
