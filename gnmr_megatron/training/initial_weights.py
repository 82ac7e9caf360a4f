"""Which checkpoint a new run takes its weights from, and whether it is of the same model. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gnmr_megatron.data.manifest import DatasetInfo
from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.training.checkpoint_files import (
    DESCRIPTION,
    FOLDER,
    CheckpointDescription,
    complete_checkpoints,
)
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.identity import (
    LORA_BASE,
    LORA_RANK,
    differences,
    run_identity,
    saved_model,
)

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
    """The checkpoint that `init_from` means, or None; with adapters it is that of the base.

    Raises:
        ConfigError: it is no checkpoint, or one of another model or tokenizer; says what differs.
    """
    if config.init_from is None or config.lora.is_on:
        return None
    return _fitting_checkpoint("init_from", config.init_from, config, data)


def base_weights(config: RunConfig, data: DatasetInfo) -> Path | None:
    """The checkpoint of the frozen weights under adapters, or None without adapters.

    Raises:
        ConfigError: as for `initial_weights`.
    """
    if not config.lora.is_on:
        return None
    key, value = (
        ("lora.base", config.lora.base) if config.lora.base else ("init_from", config.init_from)
    )
    assert value is not None  # validated
    return _fitting_checkpoint(key, value, config, data)


def lora_identity(config: LoraConfig, base: Path | None) -> dict[str, Any]:
    """What has to be equal of adapters on resume: their shape, where they are, and what lies under them."""
    if base is None:
        return {LORA_RANK: 0}
    return {
        LORA_RANK: config.rank,
        "lora.alpha": config.alpha,
        "lora.units": config.units,
        LORA_BASE: fingerprint(CheckpointDescription.read(base)),
    }


def fingerprint(description: CheckpointDescription) -> str:
    """What tells the weights of a checkpoint from others: the checksums of all its files in one."""
    sums = json.dumps({name: file.sha256 for name, file in sorted(description.files.items())})
    return hashlib.sha256(sums.encode()).hexdigest()


def _fitting_checkpoint(key: str, value: str, config: RunConfig, data: DatasetInfo) -> Path:
    try:
        path = find_checkpoint(Path(value))
        saved = CheckpointDescription.read(path).identity
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from error
    if saved.get(LORA_RANK):
        raise ConfigError(
            f"{key}: {path} holds adapters only; merge them with their base first: gnmr-megatron lora merge {path} "
            "--output FOLDER"
        )
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
            f"{key}: {path} does not fit this run:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nset these as they were saved, and prepare data with the saved tokenizer"
        )
    return path
