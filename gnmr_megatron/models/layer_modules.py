"""Modules that megatron-core has only with Transformer Engine, on plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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
    """Causal core attention on torch's scaled_dot_product_attention; no dropout, no packed sequences."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any
    ) -> None:
        super().__init__(config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any
    ) -> Tensor:
        """[sequence, batch, heads, head_size] each (fewer for key, value) to [sequence, batch, hidden]."""
        sequence, batch, heads, size = query.shape
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=k.shape[1] != heads
        )
        return out.permute(2, 0, 1, 3).reshape(sequence, batch, heads * size)
