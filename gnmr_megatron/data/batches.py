"""Microbatches of one data-parallel rank, from a position in the planned order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gnmr_megatron.errors import DataError


@dataclass(frozen=True)
class Batch:
    """One microbatch.

    Attributes:
        tokens: int64 [micro_batch, sequence].
        labels: int64 [micro_batch, sequence]; the tokens, one place on.
        loss_mask: float32 [micro_batch, sequence]; 0 where a label does not count.
        position_ids: int64 [micro_batch, sequence].
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor

    def of_context_rank(self, rank: int, size: int) -> Batch:
        """What a context-parallel rank computes of each sequence.

        Of 2 * size pieces those at `rank` and as far from the end, which evens out the work of causal attention.
        Source: Megatron's get_batch_on_this_cp_rank.
        """
        if size == 1:
            return self
        pieces = [part.chunk(2 * size, dim=1) for part in self._parts()]
        return Batch(*(torch.cat((p[rank], p[2 * size - 1 - rank]), dim=1) for p in pieces))

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        if self.tokens.device == device:
            return self
        return Batch(*(part.to(device, non_blocking=True) for part in self._parts()))

    def _parts(self) -> tuple[Tensor, ...]:
        return (self.tokens, self.labels, self.loss_mask, self.position_ids)


class GivesBatches(Protocol):
    """What the training loop asks of the data."""

    def next_step(self) -> list[Batch]:
        """Microbatches of the coming step."""


def _collate(samples: Sequence[dict[str, Tensor]]) -> Batch:
    return Batch(
        *(
            torch.stack([s[key] for s in samples])
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        )
    )


class TrainBatches:
    """Iterates over the microbatches of a data-parallel rank, in Megatron's order.

    Microbatch k of rank r holds samples consumed + (k * ranks + r) * micro_batch_size and the following; building it
    again with a later `consumed_samples` goes on exactly there.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int,
        num_workers: int = 0,
    ) -> None:
        self._size = len(dataset)
        indices = _indices(
            consumed_samples, self._size, micro_batch_size, data_parallel_rank, data_parallel_size
        )
        self._batches = iter(
            DataLoader(dataset, batch_sampler=indices, collate_fn=_collate, num_workers=num_workers)
        )

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> Batch:
        """The next microbatch.

        Raises:
            DataError: the planned order is used up.
        """
        try:
            batch: Batch = next(self._batches)
        except StopIteration:
            raise DataError(
                f"all {self._size} planned training sequences are used; start runs that may go on for longer with a "
                "higher data.train_samples"
            ) from None
        return batch


def _indices(consumed: int, total: int, micro_batch: int, rank: int, ranks: int) -> list[list[int]]:
    rounds = range(consumed, total - micro_batch * ranks + 1, micro_batch * ranks)
    return [
        list(range(start + rank * micro_batch, start + (rank + 1) * micro_batch))
        for start in rounds
    ]


def fixed_batches(
    dataset: Any,
    *,
    num_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[Batch]:
    """This rank's share of the first `num_samples` samples, the same ones each time."""
    mine = _indices(
        0, min(num_samples, len(dataset)), micro_batch_size, data_parallel_rank, data_parallel_size
    )
    return (_collate([_as_tensors(dataset[index]) for index in indices]) for indices in mine)


def _as_tensors(sample: dict[str, Any]) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value) for key, value in sample.items()}
