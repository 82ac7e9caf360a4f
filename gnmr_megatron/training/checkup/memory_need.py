"""What a rank needs of memory, worked out from the settings of the run. No torch.

In bytes; P is the number of parameters that the rank holds, d the bytes of a value of the model's type:
- weights d P, gradients 4 P (accumulated in FP32);
- optimizer: two moments 8 P, and main parameters 4 P where the model is BF16; divided by the ranks that share them with
  the distributed optimizer;
- activations: what the forward keeps for the backward, see `activation_bytes`.

Not counted: buffers that live for one operation, the allocator's gaps, what CUDA, NCCL and Python take, and on CPUs
what a save in the background holds of weights that training has changed meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gnmr_megatron.models.precision_plan import UnitPlan
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.launch_plan import LaunchPlan

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes that one rank holds at the height of a step.

    Attributes:
        weights: in the model's type.
        gradients: in FP32.
        optimizer: moments and main parameters.
        activations: kept for the backward.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_need(plan: LaunchPlan, *, vocab_size: int, on_gpu: bool) -> MemoryNeed:
    """What the fullest rank of a run holds."""
    stages = range(plan.config.parallel.pipeline_model_parallel_size)
    needs = [
        _memory_of_stage(plan, stage, vocab_size=vocab_size, on_gpu=on_gpu) for stage in stages
    ]
    return max(needs, key=lambda need: need.total)


def _memory_of_stage(plan: LaunchPlan, stage: int, *, vocab_size: int, on_gpu: bool) -> MemoryNeed:
    config, layout = plan.config, plan.config.parallel
    parameters = parameters_of_stage(plan, stage, vocab_size=vocab_size)
    moments, main = 8, 4 if config.model.dtype == "bf16" else 0
    shares = 1
    if layout.use_distributed_optimizer:
        shares = layout.data_parallel(plan.world_size) * layout.context_parallel_size
    return MemoryNeed(
        weights=_value_bytes(config) * parameters,
        gradients=_FP32 * parameters,
        optimizer=(moments + main) * parameters // shares,
        activations=activation_bytes(plan, stage, vocab_size=vocab_size, on_gpu=on_gpu),
    )


def parameters_of_stage(plan: LaunchPlan, stage: int, *, vocab_size: int) -> int:
    """Parameters that each rank of a pipeline stage holds."""
    config = plan.config
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    last_stage = config.parallel.pipeline_model_parallel_size - 1
    projections = [
        math.prod(unit.held(tensor)) for unit in config.unit_plans() if unit.unit.layer == 0
    ]
    total = len(_layers(plan, stage)) * (sum(projections) + 2 * model.hidden_size)
    embedding = model.padded_vocab_size(vocab_size) // tensor * model.hidden_size
    if stage == 0:
        total += embedding
    if stage == last_stage:
        is_same = model.tie_embeddings and stage == 0
        total += model.hidden_size + (0 if is_same else embedding)
    return total


def activation_bytes(plan: LaunchPlan, stage: int, *, vocab_size: int, on_gpu: bool) -> int:
    """Bytes that a rank of a stage keeps between forward and backward, for all microbatches in flight.

    A token of a layer keeps, beside what the low paths keep of their inputs: the inputs of two norms (twice and in FP32
    on CPUs), queries, keys and values as they leave linear_qkv, queries and keys once more after rotation, the
    attention's output, and of SwiGLU what leaves linear_fc1 (and its two factors on CPUs, where it is not fused). The
    last stage keeps FP32 logits.
    """
    config = plan.config
    layout, train = config.parallel, config.train
    tokens = config.data.sequence_length // layout.context_parallel_size * train.micro_batch_size
    layers = set(_layers(plan, stage))
    fixed = _token_bytes(config, on_gpu=on_gpu)
    each = dict.fromkeys(layers, fixed)
    for unit in config.unit_plans():
        if unit.unit.layer in layers:
            each[unit.unit.layer] += _kept_bytes(config, unit)
    if train.recompute == "full":
        inputs = _value_bytes(config) * config.model.hidden_size / _sequence_parts(config)
        kept, once = inputs * len(layers), max(each.values())
    else:
        kept, once = sum(each.values()), 0.0
    total = kept * _microbatches_in_flight(plan, stage) + once
    if stage == layout.pipeline_model_parallel_size - 1:
        total += _head_bytes(config, vocab_size, on_gpu=on_gpu)
    return round(tokens * total)


def _layers(plan: LaunchPlan, stage: int) -> list[int]:
    spans = plan.stages()[stage]["layers"]
    return [layer for first, last in spans for layer in range(first, last + 1)]


def _value_bytes(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bf16" else 4


def _sequence_parts(config: RunConfig) -> int:
    """Ranks over which norms and residuals of a sequence are split."""
    layout = config.parallel
    return layout.tensor_model_parallel_size if layout.sequence_parallel else 1


def _norm_bytes(config: RunConfig, *, on_gpu: bool) -> float:
    """What a norm keeps of a token: its input, or on CPUs the FP32 input and the normalised one; and a factor."""
    kept = _value_bytes(config) if on_gpu else 2 * _FP32
    return (kept * config.model.hidden_size + _FP32) / _sequence_parts(config)


def _token_bytes(config: RunConfig, *, on_gpu: bool) -> float:
    """What a layer keeps of a token, without the inputs of its projections."""
    model, layout = config.model, config.parallel
    context = layout.context_parallel_size
    queries = model.head_size * model.num_attention_heads
    keys = model.head_size * model.query_groups
    attention = 2 * queries + 3 * keys + (2 * keys * context if context > 1 else 0)
    if config.train.recompute != "core_attn":
        attention += queries  # its output
    values = attention + (2 if on_gpu else 4) * model.ffn_hidden_size
    log_sums = _FP32 * model.num_attention_heads
    split = (values * _value_bytes(config) + log_sums) / layout.tensor_model_parallel_size
    return 2 * _norm_bytes(config, on_gpu=on_gpu) + split


def _kept_bytes(config: RunConfig, unit: UnitPlan) -> float:
    """What a projection keeps of a token's input on a rank; recovered units are few and not counted apart."""
    if unit.unit.operator == "linear_proj" and PATHS[unit.low].family in ("exact", "frozen"):
        return 0.0  # the attention's output, which is kept already
    layout = config.parallel
    of_all_ranks = unit.kept_bytes(
        unit.low,
        config.precision,
        tensor_parallel=layout.tensor_model_parallel_size,
        sequence_parallel=layout.sequence_parallel,
    )
    return of_all_ranks / layout.tensor_model_parallel_size


def _head_bytes(config: RunConfig, vocab_size: int, *, on_gpu: bool) -> float:
    """The last norm, the input of the output layer and FP32 logits of a token."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    logits = _FP32 * model.padded_vocab_size(vocab_size) / tensor
    inputs = _value_bytes(config) * model.hidden_size / _sequence_parts(config)
    return _norm_bytes(config, on_gpu=on_gpu) + inputs + logits


def _microbatches_in_flight(plan: LaunchPlan, stage: int) -> float:
    """Microbatches of which a stage keeps activations at the same time; a chunk of its layers counts as its part."""
    layout = plan.config.parallel
    stages, chunks = (
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size,
    )
    microbatches, after = int(plan.batch()["microbatches"]), stages - stage - 1
    if chunks is None:
        return min(after + 1, microbatches)
    return min(2 * after + (chunks - 1) * stages + 1, microbatches * chunks) / chunks
