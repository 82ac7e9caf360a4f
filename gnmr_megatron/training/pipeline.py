"""The model over its pipeline: forward and backward of a batch, and the loss that all ranks know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gnmr_megatron.data.batches import Batch
from gnmr_megatron.distributed import engine_compat


@dataclass(frozen=True)
class RankStatus:
    """What a rank tells all others once a step; it travels with the loss, so that no collective is added.

    Attributes:
        stop_requested: whether it was asked to stop.
        is_writing: whether it is still writing its part of a checkpoint.
    """

    stop_requested: bool = False
    is_writing: bool = False


NOTHING_TO_TELL = RankStatus()


@dataclass(frozen=True)
class BatchLoss:
    """Mean loss of a batch over all ranks.

    Attributes:
        loss: mean cross-entropy in nats a token.
        tokens: tokens it is the mean of.
        stop_requested: whether any rank was asked to stop.
        is_writing: whether any rank is still writing its part of a checkpoint.
    """

    loss: float
    tokens: int
    stop_requested: bool
    is_writing: bool


class RunsBatches(Protocol):
    """What the training step asks of the model."""

    def zero_grad_buffers(self) -> None:
        """Forget the gradients of the last step."""

    def forward_backward(
        self, batches: Sequence[Batch], status: RankStatus = NOTHING_TO_TELL
    ) -> BatchLoss:
        """Accumulate the gradients of a batch."""


class PipelinedModel:
    """Model chunks of this rank, run by megatron-core's schedule (none, 1F1B or interleaved).

    Args:
        chunks: DDP-wrapped model chunks.
        sequence_length: tokens a sequence.
        micro_batch_size: sequences a forward pass.
        device: device of the chunks.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        *,
        sequence_length: int,
        micro_batch_size: int,
        device: torch.device,
    ) -> None:
        self.chunks = list(chunks)
        self._sequence_length, self._micro_batch_size = sequence_length, micro_batch_size
        self._device = device
        self._context = (
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
        )
        self._schedule = get_forward_backward_func()

    def zero_grad_buffers(self) -> None:
        """Forget the gradients of the last step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]  # DDP's
            # the engine's FP32 optimizer leaves them as aliases of the buffers, which backward would add to twice
            chunk.zero_grad(set_to_none=True)

    def forward_backward(
        self, batches: Sequence[Batch], status: RankStatus = NOTHING_TO_TELL
    ) -> BatchLoss:
        """Accumulate the gradients of this replica's microbatches, reduced over replicas.

        Args:
            batches: microbatches of this data-parallel rank.
            status: of this rank.
        """
        return self._run(batches, status, forward_only=False)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> BatchLoss:
        """Mean loss without gradients."""
        for chunk in self.chunks:
            chunk.eval()
        try:
            with engine_compat.gathered_parameters(self.chunks):
                return self._run(batches, NOTHING_TO_TELL, forward_only=True)
        finally:
            for chunk in self.chunks:
                chunk.train()

    def _run(
        self, batches: Sequence[Batch], status: RankStatus, *, forward_only: bool
    ) -> BatchLoss:
        iterators = [iter(batches) for _ in self.chunks]
        reports = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=self._sequence_length,
            micro_batch_size=self._micro_batch_size,
            forward_only=forward_only,
        )
        return self._agree(reports, status)

    def _forward_step(
        self, iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        whole = next(iterator).to(self._device)
        batch = whole.of_context_rank(*self._context)
        hidden = whole.attention_mask(*self._context)
        output = model(batch.tokens, batch.position_ids, hidden, labels=batch.labels)

        def loss_function(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, tokens = (losses.float() * batch.loss_mask).sum(), batch.loss_mask.sum()
            return total, tokens.int(), {"loss": torch.stack([total.detach(), tokens])}

        return output, loss_function

    def _agree(self, reports: Sequence[dict[str, Tensor]], status: RankStatus) -> BatchLoss:
        """Sum losses and tokens, and count what ranks have to tell, in one all-reduce."""
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        speaks = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        if speaks:
            for report in reports:
                sums[:2] += report["loss"].double()
        sums[2], sums[3] = float(status.stop_requested), float(status.is_writing)
        dist.all_reduce(sums)
        total, tokens, stopping, writing = sums.tolist()
        loss = total / tokens if tokens else float("nan")
        return BatchLoss(loss, int(tokens), stopping > 0, writing > 0)
