"""The documents of `perplexity`: a file of the user's, or what a run held out of its training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.indexed_dataset import IndexedDataset

from gnmr_megatron.data.manifest import describe_datasets
from gnmr_megatron.data.tokenizer import Tokenizer
from gnmr_megatron.errors import ConfigError, DataError
from gnmr_megatron.training.config import RunConfig


def documents(
    text: Path | None, run: RunConfig | None, tokenizer: Tokenizer, *, limit: int | None
) -> list[str]:
    """Texts in their order; those without a character are left out.

    Args:
        text: .jsonl with a `text` in each line, or any other file, which is one document.
        run: whose held-out documents to take where there is no file.
        tokenizer: of the run's data.
        limit: only the first so many.

    Raises:
        DataError: a file cannot be read, or there is no text.
        ConfigError: there is neither a file nor a run with text of its own.
    """
    if text is not None:
        found = _of_file(text)
    elif run is not None:
        found = _held_out(run, tokenizer)
    else:
        raise ConfigError(
            "--text: is needed for perplexity, because no run with held-out text is around the checkpoint; name a text "
            'file, or a .jsonl file of {"text": ...}'
        )
    texts = list(islice((document for document in found if document.strip()), limit))
    if not texts:
        raise DataError(f"{text or 'the held-out part of the run'}: holds no text")
    return texts


def _of_file(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if path.suffix not in (".jsonl", ".json"):
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}:{number}: is no JSON object with a "text" ({error}); each line has to be one'
            ) from error
        if not isinstance(document, str):
            raise DataError(f"{path}:{number}: `text` is no string")
        yield document


def _held_out(run: RunConfig, tokenizer: Tokenizer) -> Iterator[str]:
    info = describe_datasets(run.data)
    if info.kind != "text":
        raise ConfigError(
            "--text: is needed for perplexity, because the run was trained on instruction data; name a text file"
        )
    if info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{run.data.datasets[0]}: was prepared with another tokenizer by now; name a file with --text"
        )
    shares = parse_and_normalize_split(run.data.split)
    first, last = shares[0], shares[0] + shares[1]
    for prefix in info.prefixes:
        dataset = IndexedDataset(str(prefix))
        number = len(dataset)
        for index in range(round(first * number), round(last * number)):
            ids = dataset[index].tolist()
            yield tokenizer.decode(ids[:-1] if ids and ids[-1] == info.eod else ids)
