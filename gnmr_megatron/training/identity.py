"""What makes a checkpoint belong to a run: the model, the vocabulary, the units and the seed. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from gnmr_megatron.models.config import LlamaConfig

Identity = Mapping[str, Any]
"""Plain values by dotted key."""

LORA_RANK = "lora.rank"
"""Key of the rank of adapters; 0 where the whole model was trained."""

LORA_BASE = "lora.base"
"""Key of the fingerprint of the frozen weights under adapters."""

_MODEL = "model."


def run_identity(
    model: LlamaConfig, *, tokenizer: str | None, vocab_size: int, **others: Any
) -> dict[str, Any]:
    """What a checkpoint says of the run that saved it.

    Args:
        model: architecture.
        tokenizer: fingerprint of the tokenizer, or None where there is none.
        vocab_size: entries of the vocabulary, without padding.
        others: further values.
    """
    fields = {f"{_MODEL}{key}": value for key, value in dataclasses.asdict(model).items()}
    return {**fields, "tokenizer": tokenizer, "vocab_size": vocab_size, **others}


def saved_model(identity: Identity) -> LlamaConfig:
    """The architecture of a checkpoint; fields that it is too old to name have their defaults."""
    fields = {f.name for f in dataclasses.fields(LlamaConfig)}
    named = {key.removeprefix(_MODEL): value for key, value in identity.items()}
    return LlamaConfig(**{key: value for key, value in named.items() if key in fields})


def differences(saved: Identity, now: Identity, *, ignored: Collection[str] = ()) -> list[str]:
    """One line for each value that is another one now.

    Checkpoints of older versions lack some: a model field then had its default, the size of the vocabulary
    follows from the tokenizer, and there were no adapters.
    """
    complete = {
        "vocab_size": now.get("vocab_size"),
        LORA_RANK: 0,
        **{f"{_MODEL}{f.name}": f.default for f in dataclasses.fields(LlamaConfig)},
        **saved,
    }
    return [
        f"{key}: saved {complete.get(key)}, now {value}"
        for key, value in now.items()
        if key not in ignored and complete.get(key) != value
    ]
