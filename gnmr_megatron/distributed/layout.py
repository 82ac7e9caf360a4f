"""The parallel layout: sizes that multiply to the number of processes. No torch, so it is checked first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gnmr_megatron.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How model and batch are spread over processes, in Megatron's terms.

    Raises:
        LayoutError: a size is out of range, or options that do not go together.
    """

    tensor_model_parallel_size: int = 1
    """Processes that share each layer's weights."""

    pipeline_model_parallel_size: int = 1
    """Processes that share the layers."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks of each pipeline process (interleaved schedule); null for one."""

    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first pipeline process, which holds the embedding, too; null for an even share."""

    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline process, which holds the output layer, too; null for an even share."""

    context_parallel_size: int = 1
    """Processes that share each sequence."""

    data_parallel_size: int | None = None
    """Replicas that share the batch; null takes what the number of processes leaves (1 without torchrun)."""

    sequence_parallel: bool = False
    """Split norms and residuals along the sequence over the tensor-parallel processes."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel processes."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass runs; needs the distributed optimizer."""

    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig, for features that have no setting here."""

    def __post_init__(self) -> None:
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        ):
            if getattr(self, key) < 1:
                raise LayoutError(f"parallel.{key}: {getattr(self, key)} must be at least 1")
        self._check_uneven_stages()
        if self.data_parallel_size is not None and self.data_parallel_size < 1:
            raise LayoutError(
                f"parallel.data_parallel_size: {self.data_parallel_size} must be at least 1, or null"
            )
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is not None and (virtual < 2 or self.pipeline_model_parallel_size < 2):
            raise LayoutError(
                f"parallel.virtual_pipeline_model_parallel_size: {virtual} needs at least 2 chunks and "
                "parallel.pipeline_model_parallel_size of at least 2; set it to null for one chunk a process"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise LayoutError(
                "parallel.sequence_parallel: true needs parallel.tensor_model_parallel_size of at least 2"
            )
        if self.overlap_param_gather and not (
            self.use_distributed_optimizer and self.overlap_grad_reduce
        ):
            raise LayoutError(
                "parallel.overlap_param_gather: true needs parallel.use_distributed_optimizer: true and "
                "parallel.overlap_grad_reduce: true"
            )

    def _check_uneven_stages(self) -> None:
        for key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            layers = getattr(self, key)
            if layers is None:
                continue
            if layers < 1:
                raise LayoutError(f"parallel.{key}: {layers} must be at least 1, or null")
            if self.pipeline_model_parallel_size < 2:
                raise LayoutError(
                    f"parallel.{key}: {layers} needs parallel.pipeline_model_parallel_size of at least 2; "
                    "set it to null"
                )

    @property
    def model_parallel_size(self) -> int:
        """Processes of one replica."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def layers_left(self, num_layers: int) -> tuple[int, int]:
        """Layers that no uneven stage has taken, and the pipeline processes that share them."""
        taken = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        uneven = [layers for layers in taken if layers is not None]
        return num_layers - sum(uneven), self.pipeline_model_parallel_size - len(uneven)

    def data_parallel(self, world_size: int) -> int:
        """Replicas in a world of so many processes.

        Raises:
            LayoutError: the sizes do not multiply to the number of processes.
        """
        replicas, rest = divmod(world_size, self.model_parallel_size)
        if rest or replicas == 0:
            raise LayoutError(
                f"{world_size} processes cannot hold replicas of {self.model_parallel_size} (parallel."
                f"tensor_model_parallel_size {self.tensor_model_parallel_size} x parallel."
                f"pipeline_model_parallel_size {self.pipeline_model_parallel_size} x parallel."
                f"context_parallel_size {self.context_parallel_size}): start a multiple of "
                f"{self.model_parallel_size}, or change the sizes"
            )
        if self.data_parallel_size not in (None, replicas):
            raise LayoutError(
                f"parallel.data_parallel_size: {self.data_parallel_size}, but {world_size} processes make "
                f"{replicas} replicas of {self.model_parallel_size}; set it to {replicas} or null, or start "
                f"{(self.data_parallel_size or 1) * self.model_parallel_size} processes"
            )
        return replicas

    @property
    def default_world_size(self) -> int:
        """Processes to start where nobody else started them."""
        return self.model_parallel_size * (self.data_parallel_size or 1)

    def engine_fields(self) -> dict[str, Any]:
        """The layout's fields of megatron-core's `TransformerConfig`."""
        has_virtual_stages = self.virtual_pipeline_model_parallel_size is not None
        return {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size,
            "num_layers_in_first_pipeline_stage": self.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": self.num_layers_in_last_pipeline_stage,
            "context_parallel_size": self.context_parallel_size,
            "sequence_parallel": self.sequence_parallel,
            # with two stages both neighbours are one process, and batched p2p matches their messages by order
            # alone: losses were silently wrong
            "overlap_p2p_comm": has_virtual_stages,
            "batch_p2p_comm": not has_virtual_stages,
        }
