"""How instruction data is to be prepared: the chat template and its special tokens, and what is too long."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gnmr_megatron.data.instruction.template import DEFAULT_TEMPLATE
from gnmr_megatron.data.manifest import MANIFEST, read_manifest
from gnmr_megatron.errors import DataError

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

TooLong = Literal["truncate", "drop"]


@dataclass(frozen=True, kw_only=True)
class InstructionOptions:
    """What determines how examples become tokens, besides the tokenizer.

    Attributes:
        template: chat template.
        special_tokens: its variables, such as `eos_token`; those of the tokenizer where they are not named.
        sequence_length: most places that an example may take in a sequence, one less than its tokens; None for any.
        too_long: whether an example that takes more loses its end, or is left out.
    """

    template: str = DEFAULT_TEMPLATE
    special_tokens: dict[str, str] = field(default_factory=dict)
    sequence_length: int | None = None
    too_long: TooLong = "truncate"

    def __post_init__(self) -> None:
        if self.sequence_length is not None and self.sequence_length < 1:
            raise DataError(f"--sequence-length: {self.sequence_length} must be at least 1")

    def write(self, folder: Path) -> None:
        """Write template and special tokens where `chat_template` and Hugging Face's tokenizers look for them."""
        config = {**self.special_tokens, "chat_template": self.template}
        (folder / TOKENIZER_CONFIG).write_text(
            json.dumps(config, indent=1) + "\n", encoding="utf-8"
        )


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer of a prepared dataset, or of a folder in Hugging Face's layout.

    Raises:
        DataError: there is none.
    """
    if (folder / MANIFEST).exists():
        return folder / read_manifest(folder).tokenizer
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"--tokenizer-from: {folder} holds no {MANIFEST}, tokenizer.json or tokenizer.model; name a dataset that "
        "prepare-data wrote, or a tokenizer's folder"
    )


def chat_template(given: str | None, folder: Path) -> tuple[str, dict[str, str]]:
    """Template and special tokens by their names.

    Args:
        given: a template, or the name of a file that holds one; None takes that of the tokenizer's folder, from
            chat_template.jinja or tokenizer_config.json, or else a plain one.
        folder: of the tokenizer.

    Raises:
        DataError: a file cannot be read.
    """
    config = tokenizer_config(folder)
    tokens = {
        name: _written(value)
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    if given is not None:
        return given if "{" in given else _read(Path(given)), tokens
    if (folder / TEMPLATE_FILE).is_file():  # newer folders keep it apart
        return _read(folder / TEMPLATE_FILE), tokens
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {item.get("name"): item.get("template") for item in found}.get("default")
    return found if isinstance(found, str) else DEFAULT_TEMPLATE, tokens


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's tokenizer_config.json; empty where there is none.

    Raises:
        DataError: it cannot be read, or is no JSON object.
    """
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; mend or remove it") from error
    if not isinstance(config, dict):
        raise DataError(f"{path}: is no JSON object; mend or remove it")
    return config


def _written(token: str | dict[str, Any]) -> str:
    """How a token is written; configurations hold that, or an object with it."""
    return token if isinstance(token, str) else str(token.get("content", ""))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"--chat-template: {path} cannot be read: {error}; give a file, or a Jinja2 template"
        ) from error
