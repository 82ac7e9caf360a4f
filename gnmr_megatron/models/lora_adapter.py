"""The low-rank part of a projection, sharded as Megatron shards the projection."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.precision.linear import linear
from gnmr_megatron.precision.paths import ExactPath, PrecisionPath, SavedPath
from gnmr_megatron.precision.quantizer import Quantizer

_EXACT = ExactPath("exact")


class LoraAdapter(torch.nn.Module):
    """scale * B A x, to be added to what a parallel linear returns.

    Column-parallel: every rank holds A, and the rows of B that belong to its outputs. Row-parallel: the columns of A
    that belong to its inputs, and B. What ranks exchange besides the linear's own traffic has the width of the rank.

    Without sequence parallelism the gradient of the matrix that every rank holds is whole on each of them: the
    gradient of A x is summed over the ranks of a column-parallel linear, A x over those of a row-parallel one. With it,
    each rank sees its part of the tokens, and the mark `sequence_parallel` has `finalize_model_grads` sum the gradient.

    Args:
        weight: [out, in] of the linear that one rank holds.
        config: rank, scale and dropout.
        split: whether the linear holds a part of its outputs (`column`) or inputs (`row`).
        sequence_parallel: whether tokens are split between the ranks outside the linears.
        tp_group: ranks that share the linear.
    """

    def __init__(
        self,
        weight: Tensor,
        config: LoraConfig,
        *,
        split: Literal["column", "row"],
        sequence_parallel: bool,
        tp_group: Any,
    ) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = torch.nn.Parameter(weight.new_zeros(config.rank, columns))
        self.b = torch.nn.Parameter(weight.new_zeros(rows, config.rank))
        self.scale = config.scale
        self._dropout = config.dropout
        self._split, self._is_sequence_parallel = split, sequence_parallel
        self._group = tp_group
        shared, own, dim = (self.a, self.b, 0) if split == "column" else (self.b, self.a, 1)
        set_tensor_model_parallel_attributes(own, True, dim, 1)
        shared.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]  # engine's mark

    def forward(self, x: Tensor, path: PrecisionPath, quantizer: Quantizer | None) -> Tensor:
        """What to add to the linear's output.

        Args:
            x: the linear's input, as this rank holds it.
            path: the unit's; where it packs what it keeps, so it does of the input of A. All GEMMs here are exact.
            quantizer: of the unit.
        """
        kept = path if isinstance(path, SavedPath) else _EXACT
        hidden = self._exchanged(linear(self._dropped(x), self.a, kept, quantizer=quantizer))
        return F.linear(hidden, self.b) * self.scale

    def _exchanged(self, hidden: Tensor) -> Tensor:
        if self._group.size() == 1:
            return hidden
        exchange = {
            ("column", False): copy_to_tensor_model_parallel_region,
            ("column", True): gather_from_sequence_parallel_region,
            ("row", False): reduce_from_tensor_model_parallel_region,
            ("row", True): reduce_scatter_to_sequence_parallel_region,
        }[self._split, self._is_sequence_parallel]
        result: Tensor = exchange(hidden, group=self._group)
        return result

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or not self._dropout:
            return x
        if self._split == "column" and not self._is_sequence_parallel:
            return F.dropout(x, self._dropout)  # all ranks hold the same input and draw alike
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self._dropout)
