"""What goes along with weights: tokenizer files and the fields of config.json that no model has. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from gnmr_megatron.data.instruction.options import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    tokenizer_config,
)
from gnmr_megatron.data.manifest import MANIFEST
from gnmr_megatron.data.tokenizer import Tokenizer, load_tokenizer
from gnmr_megatron.errors import ConfigError, DataError, GnmrError
from gnmr_megatron.training.checkpoint_files import FOLDER
from gnmr_megatron.training.initial_weights import find_checkpoint

FILES = "huggingface"
"""Folder of a converted checkpoint with what came beside the weights."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # the first that is there
_CONFIG, GENERATION = "config.json", "generation_config.json"
_CARRIED = (
    *_TOKENIZERS,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    GENERATION,
)


@dataclass(frozen=True)
class Companions:
    """What goes along with weights.

    Attributes:
        tokenizer: the tokenizer that they were trained with, or None.
        fields: fields of config.json.
        files: files to copy, by their names in the folder.
        chat: chat template, and the special tokens that it writes by their names, in place of those of the files.
    """

    tokenizer: Tokenizer | None
    fields: Mapping[str, Any]
    files: Mapping[str, Path] = field(default_factory=dict)
    chat: Mapping[str, str] = field(default_factory=dict)


def tokenizer_in(folder: Path, fingerprint: str | None = None) -> Tokenizer | None:
    """The tokenizer of a folder: the one of that fingerprint if several are there, or the first.

    Raises:
        DataError: it is broken.
    """
    found = [load_tokenizer(folder / name) for name in _TOKENIZERS if (folder / name).exists()]
    same = [tokenizer for tokenizer in found if tokenizer.fingerprint == fingerprint]
    return next(iter(same or found), None)


def copy_files(source: Path, target: Path) -> list[str]:
    """Copy what came beside the weights of a folder of Hugging Face's; returns the names, with the target's."""
    target.mkdir()
    names = [name for name in (_CONFIG, *_CARRIED) if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return [f"{target.name}/{name}" for name in names]


def companions_of(
    checkpoint: Path, *, files_from: Path | None, fingerprint: str | None
) -> Companions:
    """What goes along with a checkpoint.

    That is what came with it when it was converted, or with the checkpoint that its run started from; else the
    tokenizer of the run's data. The chat template is that of the conversations that the run read, if it read any.

    Args:
        checkpoint: its folder.
        files_from: a folder to take everything from instead.
        fingerprint: of the tokenizer that the weights were trained with.

    Raises:
        ConfigError: nothing is found, or the tokenizer is another one.
    """
    found = _of_folder(files_from, fingerprint) if files_from else None
    if files_from is not None and found is None:
        raise ConfigError(f"--files-from {files_from}: has no {_CONFIG}")
    found = found or _of_checkpoint(checkpoint, fingerprint)
    if found is None:
        raise ConfigError(
            f"{checkpoint}: neither it nor a run around it leads to a tokenizer that is there; give a folder with "
            f"{_CONFIG} and the tokenizer's files: --files-from FOLDER"
        )
    if fingerprint and found.tokenizer and found.tokenizer.fingerprint != fingerprint:
        raise ConfigError(
            f"{found.tokenizer.path}: is not the tokenizer that {checkpoint} was trained with; give a folder that has "
            "it: --files-from FOLDER"
        )
    return found


def write_companions(companions: Companions, config: Mapping[str, Any], folder: Path) -> str | None:
    """Write config.json and everything that goes along; returns the name of the tokenizer's file."""
    for name, path in companions.files.items():
        shutil.copyfile(path, folder / name)
    _write_json(folder / _CONFIG, config)
    if GENERATION not in companions.files:
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        given = {key: config[key] for key in ids if config.get(key) is not None}
        _write_json(folder / GENERATION, {"_from_model_config": True, **given})
    tokenizer = companions.tokenizer
    if tokenizer is None:
        return None
    if TOKENIZER_CONFIG not in companions.files:
        _write_json(folder / TOKENIZER_CONFIG, _tokenizer_settings(tokenizer))
    if companions.chat:
        _write_chat(companions.chat, tokenizer, folder)
    return next(name for name, path in companions.files.items() if path == tokenizer.path)


def _write_chat(chat: Mapping[str, str], tokenizer: Tokenizer, folder: Path) -> None:
    """Template and special tokens of the run's conversations, and the end of a turn as an end of generation."""
    # a file of its own counts more than what is in tokenizer_config.json
    (folder / TEMPLATE_FILE).write_text(chat["chat_template"], encoding="utf-8")
    tokens = {name: token for name, token in chat.items() if name != "chat_template"}
    _write_json(folder / TOKENIZER_CONFIG, tokenizer_config(folder) | tokens)
    end = tokenizer.special_tokens.get(tokens.get("eos_token", ""))
    if end is None:
        return
    generation = json.loads((folder / GENERATION).read_text())
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end not in ends:
        _write_json(folder / GENERATION, generation | {"eos_token_id": [*ends, end]})


def _of_checkpoint(checkpoint: Path, fingerprint: str | None) -> Companions | None:
    found = _of_folder(checkpoint / FILES, fingerprint)
    settings = checkpoint.parent.parent / "config.yaml"
    if found is not None or checkpoint.parent.name != FOLDER or not settings.is_file():
        return found
    try:
        run = yaml.safe_load(settings.read_text())
        length = int(run["data"]["sequence_length"])
        initial = run.get("init_from") or run.get("lora", {}).get("base")
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{settings}: cannot be read ({error})") from error
    if initial is not None:
        try:
            found = _of_checkpoint(find_checkpoint(Path(initial)), fingerprint)
        except GnmrError:  # it is gone; the data tell the tokenizer
            found = None
    found = found or _of_data(run["data"], length)
    return found and replace(found, chat=_chat_of_data(run["data"]) or found.chat)


def _of_folder(folder: Path, fingerprint: str | None) -> Companions | None:
    if not (folder / _CONFIG).is_file():
        return None
    try:
        fields = json.loads((folder / _CONFIG).read_text())
    except ValueError as error:
        raise ConfigError(f"{folder / _CONFIG}: is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{folder / _CONFIG}: is no JSON object")
    files = {name: folder / name for name in _CARRIED if (folder / name).is_file()}
    return Companions(tokenizer_in(folder, fingerprint), fields, files)


def _of_data(data: Mapping[str, Any], sequence_length: int) -> Companions | None:
    """The tokenizer of a run's data, under the name by which Hugging Face's library looks for it."""
    try:
        if data.get("tokenizer"):
            path = Path(data["tokenizer"])
        else:
            folder = Path(data["datasets"][0])
            path = folder / json.loads((folder / MANIFEST).read_text())["tokenizer"]
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError, KeyError, DataError):
        return None
    name = "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"
    fields = {
        "max_position_embeddings": sequence_length,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eod,
    }
    return Companions(tokenizer, fields, {name: tokenizer.path})


def _chat_of_data(data: Mapping[str, Any]) -> dict[str, str]:
    """The chat template that a run's conversations were written with, and its special tokens; empty for text."""
    try:
        found = tokenizer_config(Path(data["datasets"][0]))
    except (DataError, KeyError, TypeError, IndexError):
        return {}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    return texts if "chat_template" in texts else {}


def _tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """What transformers has to know to load the tokenizer."""
    if tokenizer.path.suffix == ".json":
        return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eod_token}
    return {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": tokenizer.eod_token,
        "unk_token": "<unk>",
        "bos_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
