"""Weights of frozen linears: INT8 codes for the low path, and the exact ones in host memory while nobody needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr_megatron.models.input_exchange import all_gather_single
from gnmr_megatron.models.recoverable_linear import RecoverableLinear, RecoverableRowLinear
from gnmr_megatron.precision.catalog import PathName
from gnmr_megatron.precision.frozen import PER_OUTPUT_CHANNEL, FrozenPath
from gnmr_megatron.precision.quantization import PackedTensor, pack


def frozen_path(name: PathName, linear: RecoverableLinear) -> FrozenPath:
    """The path of that name for one linear, whose weight is packed here; all ranks that share it take part.

    Scales are those of whole output channels in every layout: ranks of a row-parallel linear pack all of its columns
    and keep the codes of their own.
    """
    weight = linear.weight.detach()
    ranks = linear.tp_group.size() if isinstance(linear, RecoverableRowLinear) else 1
    if ranks == 1:
        return FrozenPath(name, packed=pack(weight, PER_OUTPUT_CHANNEL))
    gathered = weight.new_empty((ranks * weight.shape[0], weight.shape[1]))
    # bytes, because no backend promises each type
    all_gather_single(
        gathered.view(torch.uint8), weight.contiguous().view(torch.uint8), group=linear.tp_group
    )
    whole = pack(torch.cat(gathered.chunk(ranks), dim=1), PER_OUTPUT_CHANNEL)
    codes = whole.codes.chunk(ranks, dim=1)[linear.tp_group.rank()].contiguous()
    return FrozenPath(
        name, packed=PackedTensor(codes, whole.scales, PER_OUTPUT_CHANNEL, weight.shape[1])
    )


class ParkedWeight:
    """The exact weight of a frozen linear: in host memory, and on the device while a path multiplies it.

    On CPUs the two are one.
    """

    def __init__(self, linear: RecoverableLinear) -> None:
        self._linear = linear
        weight = linear.weight.data
        self._device = weight.device
        self._host: Tensor = weight.cpu().pin_memory() if weight.is_cuda else weight

    def park(self) -> None:
        """Leave only the copy in host memory."""
        self._linear.weight.data = self._host

    def fetch(self) -> None:
        """Have it on the device."""
        if self._linear.weight.device != self._device:
            self._linear.weight.data = self._host.to(self._device, non_blocking=True)
