"""Modules that megatron-core has only with Transformer Engine, on plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """RMSNorm that supports sequence parallelism.

    megatron-core's `WrappedTorchNorm` refuses it. Marking the weight makes `finalize_model_grads` sum its
    gradient over the tensor-parallel ranks, each of which sees only its part of the sequence.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # engine's mark

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class CausalAttention(MegatronModule):
    """Causal core attention on torch's scaled_dot_product_attention; no dropout.

    Under context parallelism each rank gathers keys and values of the whole sequence for its own queries, which
    takes more memory than passing them around a ring.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any
    ) -> None:
        super().__init__(config)
        self._context = parallel_state.get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """[sequence, batch, heads, head_size] each (fewer for key, value) to [sequence, batch, hidden].

        Args:
            query: of this rank.
            key: of this rank.
            value: of this rank.
            attention_mask: bool [batch, 1, queries, keys of all ranks], True where hidden, of packed sequences; None
                hides what comes later.
        """
        sequence, batch, heads, size = query.shape
        mask = None if attention_mask is None else ~attention_mask
        if self._context.size() > 1:
            both = gather_from_sequence_parallel_region(
                torch.cat((key, value), dim=-1), group=self._context
            )
            key, value = both.split(size, dim=-1)
            if mask is None:
                mask = _causal_mask(
                    sequence, self._context.rank(), self._context.size(), device=query.device
                )
        if mask is not None:  # no fused kernel takes both a mask and fewer key heads
            key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != heads
        )
        return out.permute(2, 0, 1, 3).reshape(sequence, batch, heads * size)


def _causal_mask(sequence: int, rank: int, size: int, *, device: torch.device) -> Tensor:
    """[sequence, size * sequence]: which gathered key each query of a context-parallel rank may see.

    Ranks hold two pieces of the whole sequence each: see `Batch.of_context_rank`.
    """
    piece = torch.arange(sequence // 2, device=device)
    places = [
        torch.cat((piece + r * len(piece), piece + (2 * size - 1 - r) * len(piece)))
        for r in range(size)
    ]
    return places[rank][:, None] >= torch.cat(places)[None, :]
