"""Microbatches of one data-parallel rank, from a position in the planned order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        segments: int64 [micro_batch, sequence]; the example of a packed sequence that a token belongs to. None where
            a sequence is one text.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    segments: Tensor | None = None

    def attention_mask(self, rank: int, size: int) -> Tensor | None:
        """Which keys of the whole sequence are hidden from the queries of a context-parallel rank; None for causal.

        Of a batch that is still whole.

        Returns:
            bool [micro_batch, 1, queries, keys], True where hidden: what comes later, and other examples. Keys are
            in the order in which the ranks hold them.
        """
        if self.segments is None:
            return None
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]
        order = [_share(places, each, size)[0] for each in range(size)]
        queries, keys = order[rank], torch.cat(order)
        same = self.segments[:, queries, None] == self.segments[:, None, keys]
        return ~(same & (queries[:, None] >= keys))[:, None]

    def of_context_rank(self, rank: int, size: int) -> Batch:
        """What a context-parallel rank computes of each sequence.

        Of 2 * size pieces those at `rank` and as far from the end, which evens out the work of causal attention.
        Source: Megatron's get_batch_on_this_cp_rank.
        """
        if size == 1:
            return self
        return self._of_parts(lambda part: _share(part, rank, size))

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        if self.tokens.device == device:
            return self
        return self._of_parts(lambda part: part.to(device, non_blocking=True))

    def _of_parts(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            change(self.tokens),
            change(self.labels),
            change(self.loss_mask),
            change(self.position_ids),
            None if self.segments is None else change(self.segments),
        )


def _share(part: Tensor, rank: int, size: int) -> Tensor:
    """What a context-parallel rank holds of [micro_batch, sequence]."""
    if size == 1:
        return part
    pieces = part.chunk(2 * size, dim=1)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]), dim=1)


class GivesBatches(Protocol):
    """What the training loop asks of the data."""

    def next_step(self) -> list[Batch]:
        """Microbatches of the coming step."""


def _collate(samples: Sequence[dict[str, Tensor]]) -> Batch:
    keys = ["tokens", "labels", "loss_mask", "position_ids"]
    if "segments" in samples[0]:
        keys.append("segments")
    return Batch(*(torch.stack([s[key] for s in samples]) for key in keys))


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
            DataLoader(
                dataset,
                batch_sampler=indices,
                collate_fn=_collate,
                num_workers=num_workers,
                generator=torch.Generator(),  # a seed of workers drawn from torch's would move that on each resume
            )
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
