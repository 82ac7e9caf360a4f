"""What runs where: coordinates of the ranks, layers of the stages, batch arithmetic. No torch, no printing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gnmr_megatron.training.config import RunConfig


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and its coordinates; tensor-parallel ranks are neighbours, pipeline stages far apart."""

    rank: int
    node: int
    local_rank: int
    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class LaunchPlan:
    """What runs where.

    Attributes:
        config: all settings.
        nodes: number of nodes.
        nproc_per_node: processes of each.
        arguments: arguments of `gnmr-megatron train`.
    """

    config: RunConfig
    nodes: int
    nproc_per_node: int
    arguments: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.nodes * self.nproc_per_node

    @property
    def command(self) -> list[str]:
        """The command of torchrun, the same on every node."""
        meet = ["--standalone"]
        if self.nodes > 1:
            meet = [
                "--nnodes",
                str(self.nodes),
                "--rdzv-backend",
                "c10d",
                "--rdzv-id",
                self.config.name,
            ]
            meet += ["--rdzv-endpoint", "HEAD_ADDR:29500"]
        has_resume = any(item.split("=")[0] == "--resume" for item in self.arguments)
        return [
            *("torchrun", *meet, "--nproc-per-node", str(self.nproc_per_node), "--max-restarts", "3"),
            *("-m", "gnmr_megatron", "train", *self.arguments),
            *(() if has_resume else ("--resume", "auto")),
        ]  # fmt: skip

    def place(self, rank: int) -> Place:
        """Node and coordinates of a rank, in Megatron's order tp-cp-dp-pp."""
        layout = self.config.parallel
        rest, tensor = divmod(rank, layout.tensor_model_parallel_size)
        rest, context = divmod(rest, self.config.parallel.context_parallel_size)
        stage, replica = divmod(rest, layout.data_parallel(self.world_size))
        node, local_rank = divmod(rank, self.nproc_per_node)
        return Place(rank, node, local_rank, tensor, context, replica, stage)

    def stages(self) -> list[dict[str, Any]]:
        """Of each pipeline stage: first and last layer of its chunks, and its projections."""
        layout, layers = self.config.parallel, self.config.model.num_layers
        stages = layout.pipeline_model_parallel_size
        chunks = layout.virtual_pipeline_model_parallel_size or 1
        left, sharing = layout.layers_left(layers)
        sizes = [left // sharing // chunks if sharing else 0] * stages
        if layout.num_layers_in_first_pipeline_stage is not None:
            sizes[0] = layout.num_layers_in_first_pipeline_stage // chunks
        if layout.num_layers_in_last_pipeline_stage is not None:
            sizes[-1] = layout.num_layers_in_last_pipeline_stage // chunks
        plans = self.config.unit_plans()
        rows = []
        for stage, each in enumerate(sizes):
            starts = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(chunks)]
            held = [
                plan for plan in plans if any(0 <= plan.unit.layer - start < each for start in starts)
            ]  # fmt: skip
            rows.append(
                {
                    "stage": stage,
                    "layers": [[start, start + each - 1] for start in starts],
                    "projections": len(held),
                    "units": sum(not plan.is_fixed for plan in held),
                }
            )
        return rows

    def batch(self) -> dict[str, Any]:
        """Batch arithmetic of a step."""
        train, layout = self.config.train, self.config.parallel
        replicas = layout.data_parallel(self.world_size)
        microbatches = train.global_batch_size // (train.micro_batch_size * replicas)
        idle = layout.pipeline_model_parallel_size - 1
        busy = microbatches * (layout.virtual_pipeline_model_parallel_size or 1)
        return {
            "replicas": replicas,
            "micro_batch_size": train.micro_batch_size,
            "microbatches": microbatches,
            "sequences": train.global_batch_size,
            "tokens": train.global_batch_size * self.config.data.sequence_length,
            "steps": train.steps,
            "pipeline_idle_percent": round(100 * idle / (busy + idle), 1),
        }

    def warnings(self) -> Iterator[str]:
        """What runs, but slowly."""
        tensor = self.config.parallel.tensor_model_parallel_size
        if self.nodes > 1:
            for what, size in (
                ("tensor", tensor),
                ("context", tensor * self.config.parallel.context_parallel_size),
            ):
                if self.nproc_per_node % size:
                    yield (
                        f"{what}-parallel groups cross nodes: {size} neighbouring ranks on nodes of "
                        f"{self.nproc_per_node}, so each layer waits for the network; choose sizes that divide "
                        f"{self.nproc_per_node}"
                    )
                    break
        microbatches = self.batch()["microbatches"]
        stages = self.config.parallel.pipeline_model_parallel_size
        if microbatches < stages:
            yield (
                f"the pipeline is never full: {microbatches} microbatches for {stages} stages; raise "
                "train.global_batch_size or lower train.micro_batch_size"
            )

    def as_dict(self) -> dict[str, Any]:
        """Everything, with a row for each rank."""
        return {
            "nodes": self.nodes,
            "nproc_per_node": self.nproc_per_node,
            "world_size": self.world_size,
            "commands": [self.command] * self.nodes,
            "ranks": [asdict(self.place(rank)) for rank in range(self.world_size)],
            "stages": self.stages(),
            "batch": self.batch(),
        }
