"""Packed sequences of instruction data in their planned order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor

from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.data.instruction.packing import IntArray, plan_epoch
from gnmr_megatron.data.manifest import DatasetInfo
from gnmr_megatron.errors import DataError

PARTS = ("training", "held-out")


class PackedExamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of whole examples, as many epochs of them as are asked for.

    Args:
        sources: tokens and mask of each dataset.
        examples: [examples, 2] number of dataset, and of example therein.
        lengths: [examples] places that each one takes: all tokens but the last, which is a label only.
        sequence_length: places of a sequence.
        num_samples: sequences to plan; those of a smaller number come first in those of a larger one.
        seed: of the order.
        padding: id of tokens behind the last example.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, Any]],
        examples: IntArray,
        lengths: IntArray,
        *,
        sequence_length: int,
        num_samples: int,
        seed: tuple[int, int],
        padding: int,
    ) -> None:
        self._sources, self._examples = sources, examples
        self._sequence_length, self._padding = sequence_length, padding
        self._sequences: list[list[int]] = []
        self.epochs = 0
        while len(self._sequences) < num_samples:
            self._sequences += plan_epoch(lengths, sequence_length, (*seed, self.epochs))
            self.epochs += 1
        del self._sequences[num_samples:]

    @classmethod
    def of(
        cls, config: DataConfig, info: DatasetInfo, *, part: str, num_samples: int, seed: int
    ) -> PackedExamples:
        """The training or the held-out part of all datasets.

        Raises:
            DataError: the part holds no example.
        """
        sources = [
            (IndexedDataset(str(tokens)), IndexedDataset(str(mask)))
            for tokens, mask in zip(info.prefixes, info.mask_prefixes, strict=True)
        ]
        shares = np.cumsum([0.0, *parse_and_normalize_split(config.split)])
        index = PARTS.index(part)
        examples, lengths = [], []
        for number, (tokens, _) in enumerate(sources):
            first, end = (round(share * len(tokens)) for share in shares[index : index + 2])
            if first == end:
                raise DataError(
                    f"data.split: '{config.split}' leaves no example of the {len(tokens)} in "
                    f"{info.prefixes[number].parent} for {part} data; give it a larger share, or add examples"
                )
            numbers = np.arange(first, end, dtype=np.int64)
            examples.append(np.stack((np.full_like(numbers, number), numbers), axis=1))
            lengths.append(tokens.sequence_lengths[first:end].astype(np.int64) - 1)
        return cls(
            sources,
            np.concatenate(examples),
            np.concatenate(lengths),
            sequence_length=config.sequence_length,
            num_samples=num_samples,
            seed=(seed, index),
            padding=info.eod,
        )

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence; `segments` tells examples apart, from 1 on, and 0 is padding."""
        size = self._sequence_length
        fields = {
            key: np.zeros(size, dtype=np.int64)
            for key in ("tokens", "labels", "loss_mask", "position_ids", "segments")
        }
        fields["tokens"][:], fields["labels"][:] = self._padding, self._padding
        start = 0
        for segment, example in enumerate(self._sequences[index], start=1):
            source, number = self._examples[example]
            ids, is_completion = (part[number] for part in self._sources[source])
            here = slice(start, start + len(ids) - 1)
            fields["tokens"][here], fields["labels"][here] = ids[:-1], ids[1:]
            fields["loss_mask"][here] = is_completion[1:]
            fields["position_ids"][here] = np.arange(len(ids) - 1)
            fields["segments"][here] = segment
            start = here.stop
        fields["position_ids"][start:] = np.arange(size - start)
        tensors = {key: torch.from_numpy(value) for key, value in fields.items()}
        return {**tensors, "loss_mask": tensors["loss_mask"].float()}
