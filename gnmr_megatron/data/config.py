"""Which text to train on."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets, how they are mixed and split, and the sequence length.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    datasets: list[str] = field(default_factory=lambda: ["data/stdlib"])
    """Folders that `prepare-data` wrote, or prefixes of Megatron's .bin and .idx files."""

    weights: list[float] | None = None
    """Share of each dataset in the mix; null takes all by their sizes."""

    tokenizer: str | None = None
    """A sentencepiece model or a Hugging Face tokenizer.json; null takes that of the first dataset's folder."""

    split: str = "98,2,0"
    """Shares of documents for training, held-out and test text."""

    sequence_length: int = 256
    """Tokens a sequence."""

    train_samples: int | None = None
    """Training sequences whose order is planned, fixed over a run; null takes the steps times the batch. Set it
    above that where a run may be prolonged."""

    num_workers: int = 0
    """Processes that read ahead; 0 reads in the training process."""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ConfigError(
                "data.datasets: names no dataset; make one with gnmr-megatron prepare-data"
            )
        if self.weights is not None and (
            len(self.weights) != len(self.datasets) or any(weight <= 0 for weight in self.weights)
        ):
            raise ConfigError(
                f"data.weights: {self.weights} must hold one positive number for each of the "
                f"{len(self.datasets)} data.datasets"
            )
        if self.sequence_length < 1 or self.num_workers < 0:
            raise ConfigError(
                "data.sequence_length must be at least 1, data.num_workers at least 0"
            )
        if self.train_samples is not None and self.train_samples < 1:
            raise ConfigError(
                f"data.train_samples: {self.train_samples} must be at least 1, or null"
            )
        if not _is_split(self.split):
            raise ConfigError(
                f"data.split: '{self.split}' must be three shares for training, held-out and test text, "
                "such as '98,2,0', of which the first two are positive"
            )


def _is_split(text: str) -> bool:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(shares) == 3 and min(shares) >= 0 and shares[0] > 0 and shares[1] > 0
