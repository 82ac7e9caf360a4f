"""What a column-parallel linear's input goes through between tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them, and the old names warn
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class AllReduceExchange:
    """Every rank holds the whole input; partial input gradients are summed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, shard: Tensor) -> Callable[[], Tensor]:
        """The input itself."""
        return lambda: shard

    def reduce(self, grad_input: Tensor) -> Callable[[], Tensor]:
        """Sum over ranks."""
        grad_input = grad_input.contiguous()
        work = dist.all_reduce(grad_input, group=self._group, async_op=True)
        return lambda: _after(work, grad_input)

    def own_rows(self, whole: Tensor) -> Tensor:
        """All rows."""
        return whole


class SequenceExchange:
    """Sequence parallelism: each rank holds its run of rows; gather them, and scatter the summed gradient."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, shard: Tensor) -> Callable[[], Tensor]:
        """All rows, in the order of the ranks."""
        whole = _rows_like(shard, shard.shape[0] * self._group.size())
        # bytes, because no backend promises each integer type
        work = all_gather_single(
            whole.view(torch.uint8),
            shard.contiguous().view(torch.uint8),
            group=self._group,
            async_op=True,
        )
        return lambda: _after(work, whole)

    def reduce(self, grad_input: Tensor) -> Callable[[], Tensor]:
        """This rank's rows of the sum over ranks."""
        rows = _rows_like(grad_input, grad_input.shape[0] // self._group.size())
        work = reduce_scatter_single(
            rows, grad_input.contiguous(), group=self._group, async_op=True
        )
        return lambda: _after(work, rows)

    def own_rows(self, whole: Tensor) -> Tensor:
        """This rank's run of rows, copied so that the others can be freed."""
        return whole.chunk(self._group.size())[self._group.rank()].clone()


def _rows_like(tensor: Tensor, rows: int) -> Tensor:
    return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)


def _after(work: dist.Work | None, result: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return result
