"""Tokenizers: sentencepiece models and Hugging Face's tokenizer.json, and training of the former."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from gnmr_megatron.errors import DataError

END_OF_DOCUMENT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<eod>")


class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    eod: int
    """Id that ends a document."""
    eod_token: str
    """Its text."""
    fingerprint: str
    """Hash of the tokenizer's file."""
    path: Path

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any added at its ends."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""


class SentencePieceTokenizer:
    """A sentencepiece model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.eos_id()
        self.eod_token = self._model.id_to_piece(self.eod) if self.eod >= 0 else ""
        self.fingerprint = file_hash(path)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        text: str = self._model.decode(ids)
        return text


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self.path = path
        self._model = tokenizers.Tokenizer.from_file(str(path))
        self.vocab_size = self._model.get_vocab_size()
        self.fingerprint = file_hash(path)
        found = ((token, self._model.token_to_id(token)) for token in END_OF_DOCUMENT)
        known = [(token, identifier) for token, identifier in found if identifier is not None]
        if not known:
            raise DataError(
                f"{path}: has none of the end-of-document tokens {', '.join(END_OF_DOCUMENT)}; add one"
            )
        self.eod_token, self.eod = known[0]

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        text: str = self._model.decode(ids)
        return text


class DatasetTokenizer:
    """What megatron-core's GPTDataset asks of a tokenizer."""

    def __init__(self, *, vocab_size: int, eod: int, fingerprint: str) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = -1  # no padding id: the dataset masks padded places
        self.unique_identifiers: dict[str, Any] = {"fingerprint": fingerprint}


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from its file: .json is Hugging Face's, anything else sentencepiece's.

    Raises:
        DataError: the file is missing, broken, or has no end-of-document token.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no tokenizer file")
    try:
        tokenizer: Tokenizer = (
            HuggingFaceTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)
        )
    except DataError:
        raise
    except Exception as error:  # both libraries raise bare Exception or RuntimeError
        raise DataError(
            f"{path}: is no sentencepiece model or Hugging Face tokenizer.json: {error}"
        ) from error
    if tokenizer.eod < 0:
        raise DataError(f"{path}: the model has no end-of-sentence id; train one with eos_id")
    return tokenizer


def train_sentencepiece(lines: Iterable[str], *, vocab_size: int) -> tuple[bytes, int]:
    """Train a byte-pair model that keeps every byte of a text: spaces, newlines, unknown characters.

    Args:
        lines: text to learn from, without line ends.
        vocab_size: wanted size; lowered to what the text supports.

    Returns:
        The model, and the size it got.

    Raises:
        DataError: the text is too short for any model, or the size too small for its characters.
    """
    lines = [line for line in lines if line]
    if not lines:
        raise DataError("there is no text to train a tokenizer on")
    try:
        return _train(lines, vocab_size), vocab_size
    except RuntimeError as error:
        too_high = re.search(r"Vocabulary size too high.*<= (\d+)", str(error))
        too_low = re.search(
            r"smaller than required_chars.*?(\d+) vs (\d+)|vocab_size.*?(\d+)", str(error)
        )
        if too_high:
            possible = int(too_high[1])
            return _train(lines, possible), possible
        if too_low:
            raise DataError(
                f"--vocab-size {vocab_size} is too small for the characters of this text and the 256 bytes; "
                f"sentencepiece says: {str(error).strip()}"
            ) from error
        raise DataError(f"sentencepiece cannot train on this text: {str(error).strip()}") from error


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _train(lines: list[str], vocab_size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        character_coverage=0.9995,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n"],
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        max_sentence_length=1 << 20,
        num_threads=1,  # the same model on any machine
        minloglevel=3,
    )
    return model.getvalue()
