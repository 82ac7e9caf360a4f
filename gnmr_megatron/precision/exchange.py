"""What a linear's input goes through between the ranks that share the linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class InputExchange(Protocol):
    """How rows of a linear's input come to the ranks, and gradients go back.

    `gather` and `reduce` start the exchange and return a function that waits for the result, so that the
    backward can overlap them with a GEMM.
    """

    def gather(self, shard: Tensor) -> Callable[[], Tensor]:
        """The rows of all ranks, from this rank's rows."""

    def reduce(self, grad_input: Tensor) -> Callable[[], Tensor]:
        """The gradient of this rank's rows, from a partial gradient of all rows."""

    def own_rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a gathered tensor, in memory of their own."""


class NoExchange:
    """One rank holds the whole input."""

    def gather(self, shard: Tensor) -> Callable[[], Tensor]:
        """The input itself."""
        return lambda: shard

    def reduce(self, grad_input: Tensor) -> Callable[[], Tensor]:
        """The gradient itself."""
        return lambda: grad_input

    def own_rows(self, whole: Tensor) -> Tensor:
        """All rows."""
        return whole
