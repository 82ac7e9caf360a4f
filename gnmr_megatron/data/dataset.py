"""Training and held-out sequences through megatron-core's blended datasets."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch.distributed as dist
import torch.utils.data
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.data.instruction.dataset import PackedExamples
from gnmr_megatron.data.manifest import CACHE, DatasetInfo
from gnmr_megatron.data.tokenizer import DatasetTokenizer
from gnmr_megatron.errors import DataError

LOCK = ".lock"
LOCK_SECONDS = 1800.0


@dataclass(frozen=True)
class Datasets:
    """Sequences in their planned order."""

    train: torch.utils.data.Dataset[Any]
    valid: torch.utils.data.Dataset[Any]


def open_datasets(
    config: DataConfig, info: DatasetInfo, *, train_samples: int, valid_samples: int, seed: int
) -> Datasets:
    """Build or load the order of samples; all ranks take part where there are several.

    Args:
        config: blend, split and sequence length.
        info: from `describe_datasets`.
        train_samples: training sequences to plan; another number is another order.
        valid_samples: held-out sequences to plan.
        seed: seed of the order.

    Raises:
        DataError: a split holds no document.
    """
    if info.kind == "instruction":
        parts = {"training": train_samples, "held-out": valid_samples}
        return Datasets(
            *(
                PackedExamples.of(config, info, part=part, num_samples=samples, seed=seed)
                for part, samples in parts.items()
            )
        )
    prefixes = [str(prefix) for prefix in info.prefixes]
    cache = info.prefixes[0].parent / CACHE
    settings = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=config.sequence_length,
        blend=(prefixes, config.weights),
        split=config.split,
        path_to_cache=str(cache),
        tokenizer=DatasetTokenizer(
            vocab_size=info.vocab_size, eod=info.eod, fingerprint=info.tokenizer_fingerprint
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    for prefix in prefixes:
        _check_split(prefix, config.split, settings.split_matrix)
    with _whole_cache(cache):
        train, valid, _ = BlendedMegatronDatasetBuilder(
            GPTDataset, [train_samples, valid_samples, 0], lambda: True, settings
        ).build()
    return Datasets(train, valid)


@contextlib.contextmanager
def _whole_cache(folder: Path) -> Iterator[None]:
    """Let only one run at a time write into the cache, and remove what a killed one left unfinished.

    The engine takes every file that is there for a whole one. Runs of other hosts wait, too, where the file system has
    locks.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        yield  # only rank 0 writes, and others wait for it
        return
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / LOCK).open("w")
    except (
        OSError
    ):  # not to be written: what is there is used, or the engine says what it cannot write
        yield
        return
    with lock:
        _wait_for(lock, folder)
        for path in folder.glob("*.npy"):
            try:
                np.load(path, mmap_mode="r")
            except (ValueError, EOFError):
                path.unlink(missing_ok=True)
        yield


def _wait_for(lock: IO[str], folder: Path) -> None:
    started, is_told = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - started
        except OSError:  # a file system without locks
            return None
        if waited > LOCK_SECONDS:
            raise DataError(
                f"{folder}: another run has been writing the order of samples for {LOCK_SECONDS:.0f} s; see whether it "
                f"stands still, with: fuser {folder / LOCK}"
            )
        if waited > 5 and not is_told:
            logging.getLogger(__name__).warning(
                "%s: waiting for another run, which writes its order of samples", folder
            )
            is_told = True
        time.sleep(0.1)


def _check_split(prefix: str, split: str, matrix: list[tuple[float, float]]) -> None:
    """Refuse a split without documents, which would keep the engine looking for text for ever."""
    documents = len(IndexedDataset(prefix))
    for name, (first, last) in zip(("training", "held-out"), matrix, strict=False):
        if round(first * documents) == round(last * documents):
            raise DataError(
                f"data.split: '{split}' leaves no document of the {documents} in {prefix} for {name} text; "
                "give it a larger share, or add text"
            )
