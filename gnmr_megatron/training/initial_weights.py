"""Which checkpoint a new run takes its weights from, and whether it is of the same model. No torch."""

from __future__ import annotations

from pathlib import Path

from gnmr_megatron.data.manifest import DatasetInfo
from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.training.checkpoint_files import (
    DESCRIPTION,
    FOLDER,
    CheckpointDescription,
    complete_checkpoints,
)
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.identity import differences, run_identity, saved_model

# weights are converted to the type of the run, and how they would have been drawn does not matter
_FREE = {"model.dtype", "model.init_std", "model.vocab_padding_multiple", "vocab_size"}


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / DESCRIPTION).exists():
        return folder
    complete = complete_checkpoints(folder / FOLDER)
    if complete:
        return complete[-1]
    if (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder}: is a folder of Hugging Face's; convert it first: "
            f"gnmr-megatron convert hf-to-megatron {folder} --output FOLDER"
        )
    raise CheckpointError(f"{folder}: is no complete checkpoint, and no run that has one")


def initial_weights(config: RunConfig, data: DatasetInfo) -> Path | None:
    """The checkpoint that `init_from` means, or None.

    Raises:
        ConfigError: it is no checkpoint, or one of another model or tokenizer; says what differs.
    """
    if config.init_from is None:
        return None
    try:
        path = find_checkpoint(Path(config.init_from))
        saved = CheckpointDescription.read(path).identity
    except CheckpointError as error:
        raise ConfigError(f"init_from: {error}") from error
    now = run_identity(
        config.model, tokenizer=data.tokenizer_fingerprint, vocab_size=data.vocab_size
    )
    ignored = _FREE if saved.get("tokenizer") else _FREE | {"tokenizer"}
    lines = differences(saved, now, ignored=ignored)
    before = saved_model(saved).padded_vocab_size(saved.get("vocab_size", data.vocab_size))
    rows = config.model.padded_vocab_size(data.vocab_size)
    if before != rows:
        lines.append(
            f"padded vocabulary (model.vocab_padding_multiple): saved {before}, now {rows}"
        )
    if lines:
        raise ConfigError(
            f"init_from: {path} does not fit this run:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nset these as they were saved, and prepare data with the saved tokenizer"
        )
    return path
