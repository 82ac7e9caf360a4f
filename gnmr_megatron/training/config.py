"""All settings of a run, and their validation as a whole; no torch, so that errors come at once."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.errors import ConfigError, LayoutError
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.models.precision_plan import (
    UnitPlan,
    lora_problems,
    model_units,
    plan_problems,
    plan_units,
)
from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.training.fault_settings import Fault, fault_problems, parse_fault


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with linear warm-up and cosine decay.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    lr: float = 3e-3
    """Peak learning rate."""

    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""

    warmup_steps: int = 20
    """Steps of linear warm-up."""

    decay_steps: int | None = None
    """Step at which the cosine ends; null for the last step of the run."""

    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to norms."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    clip_grad: float = 1.0
    """Largest gradient norm of the whole model; 0 for no clipping."""

    def __post_init__(self) -> None:
        for key in ("lr", "epsilon"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"optimizer.{key}: {getattr(self, key)} must be positive")
        for key in ("warmup_steps", "weight_decay", "clip_grad"):
            if getattr(self, key) < 0:
                raise ConfigError(f"optimizer.{key}: {getattr(self, key)} must not be negative")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"optimizer.{key}: {getattr(self, key)} must be in [0, 1)")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"optimizer.min_lr_ratio: {self.min_lr_ratio} must be in [0, 1]")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"optimizer.decay_steps: {self.decay_steps} must be above optimizer.warmup_steps"
                f" ({self.warmup_steps})"
            )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long to train, on which batches, and when to evaluate and save.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    steps: int = 200
    """Optimizer steps of the whole run, those before a resume included."""

    global_batch_size: int = 16
    """Sequences a step, over all replicas."""

    micro_batch_size: int = 2
    """Sequences a forward pass; the rest is gradient accumulation and pipelining."""

    eval_interval: int = 100
    """Evaluate on held-out text every so many steps, and at the end; 0 never."""

    eval_samples: int = 64
    """Held-out sequences of an evaluation, the same ones each time."""

    max_skipped_steps: int = 10
    """Stop after so many steps in a row whose loss or gradient was not finite."""

    oracle_interval: int = 0
    """Measure what recovering each unit would bring every so many steps, for `gnmr.policy: oracle` and to judge other
    policies; 0 never. Costs a forward and backward pass for each unit, or two where both paths only save otherwise."""

    recompute: Literal["none", "core_attn", "full"] = "none"
    """What the backward computes again instead of keeping it: nothing, core attention, or whole layers."""

    timeout_minutes: float = 30.0
    """Give up on a collective after this time."""

    hang_timeout_seconds: float = 600.0
    """End the run, and name the ranks that hold it up, where a rank makes no progress for so long."""

    def __post_init__(self) -> None:
        for key in (
            "steps",
            "global_batch_size",
            "micro_batch_size",
            "eval_samples",
            "max_skipped_steps",
        ):
            if getattr(self, key) < 1:
                raise ConfigError(f"train.{key}: {getattr(self, key)} must be at least 1")
        for key in ("eval_interval", "oracle_interval"):
            if getattr(self, key) < 0:
                raise ConfigError(f"train.{key}: {getattr(self, key)} must not be negative")
        for key in ("timeout_minutes", "hang_timeout_seconds"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"train.{key}: {getattr(self, key)} must be positive")

    def engine_fields(self) -> dict[str, Any]:
        """Fields of megatron-core's `TransformerConfig`."""
        if self.recompute == "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        if self.recompute == "core_attn":
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        return {}


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When to save, and what to keep.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    interval: int = 100
    """Save every so many steps, and at the end; 0 only at the end or on a signal."""

    asynchronous: bool = True
    """Write while training goes on; false waits for each save."""

    keep_last: int | None = None
    """Remove all checkpoints but the newest so many; null keeps all."""

    keep_every: int | None = None
    """Never remove those whose step is a multiple of this; null keeps none for its step."""

    stop_seconds: float = 25.0
    """Give up on the checkpoint of a signal after this time, and say so. Plain torchrun kills after 30 seconds; the
    scripts in `launch/`, which do not, set more."""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ConfigError(f"checkpoint.interval: {self.interval} must not be negative")
        if self.stop_seconds <= 0:
            raise ConfigError(f"checkpoint.stop_seconds: {self.stop_seconds} must be positive")
        for key in ("keep_last", "keep_every"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{key}: {value} must be at least 1, or null")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run."""

    name: str = "run"
    """Name of the run; its folder is `<runs_dir>/<name>`, with a number where that exists already."""

    runs_dir: str = "runs"
    """Where run folders lie."""

    seed: int = 1234
    """Seed of weights, data order and stochastic rounding."""

    resume: str | None = None
    """Run folder to go on with, or one checkpoint in it; `latest`: the newest run of this name; `auto`: the same, or
    a new run if there is none, for restarts that nobody watches."""

    init_from: str | None = None
    """Start with the weights of this checkpoint: what `convert` wrote, a run folder, or one checkpoint in it. All else
    starts anew: optimizer, schedule, data and control. A resume ignores it."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    gnmr: ControlConfig = field(default_factory=ControlConfig)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    faults: list[dict[str, Any]] = field(default_factory=list)
    """Faults to make happen, for tests and drills: see docs/faults.md."""

    def __post_init__(self) -> None:
        self.parsed_faults()
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(
                f"name: '{self.name}' must be a folder name without '/' and leading '.'"
            )

    def parsed_faults(self) -> list[Fault]:
        """The faults that are to happen.

        Raises:
            ConfigError: one of them is malformed.
        """
        return [
            parse_fault(item, where=f"faults[{index}]") for index, item in enumerate(self.faults)
        ]

    def unit_plans(self) -> list[UnitPlan]:
        """The paths of every projection.

        Raises:
            ConfigError: see `plan_units`.
        """
        return plan_units(self.model, self.precision, self.lora)

    @property
    def train_samples(self) -> int:
        """Training sequences whose order is planned; fixed over a run, because it determines the order."""
        return self.data.train_samples or self.train.steps * self.train.global_batch_size


def validate(config: RunConfig, *, world_size: int, vocab_size: int) -> None:
    """Check that the sections fit each other, the number of processes and the vocabulary.

    Raises:
        LayoutError: with one line for each thing that does not fit, and what to change.
    """
    replicas = config.parallel.data_parallel(world_size)
    problems = [
        *_layout_problems(config, vocab_size),
        *_batch_problems(config, replicas),
        *precision_problems(config),
        *_schedule_problems(config),
        *fault_problems(
            config.parsed_faults(),
            [unit.id for unit in model_units(config.model)],
            world_size,
            with_scales=_units_with_scales(config),
        ),
        *_tracking_problems(config),
    ]
    if problems:
        raise LayoutError("\n".join(problems))


def _tracking_problems(config: RunConfig) -> Iterator[str]:
    ids = [unit.id for unit in model_units(config.model)]
    for glob in config.tracking.unit_metrics:
        if not fnmatch.filter(ids, glob):
            yield f"tracking.unit_metrics: '{glob}' matches no unit; they are like {ids[0]}"


def _layout_problems(config: RunConfig, vocab_size: int) -> Iterator[str]:
    model, layout = config.model, config.parallel
    tensor = layout.tensor_model_parallel_size
    divided = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.hidden_size": model.hidden_size,
        "the padded vocabulary (model.vocab_padding_multiple)": model.padded_vocab_size(vocab_size),
    }
    for key, value in divided.items():
        if value % tensor:
            yield (
                f"{key}: {value} is not divisible by parallel.tensor_model_parallel_size ({tensor}); "
                f"nearest that are: {_nearest(value, tensor)}"
            )
    yield from _sequence_problems(config)
    yield from _stage_problems(model.num_layers, layout)


def _sequence_problems(config: RunConfig) -> Iterator[str]:
    """A context-parallel rank takes two pieces of each sequence, so that causal attention is shared evenly."""
    layout, length = config.parallel, config.data.sequence_length
    pieces, factors = 1, []
    if layout.context_parallel_size > 1:
        pieces = 2 * layout.context_parallel_size
        factors.append(f"2 x parallel.context_parallel_size {layout.context_parallel_size}")
    if layout.sequence_parallel:
        pieces *= layout.tensor_model_parallel_size
        factors.append(
            f"parallel.tensor_model_parallel_size {layout.tensor_model_parallel_size} with sequence_parallel"
        )
    if length % pieces:
        yield (
            f"data.sequence_length: {length} is not divisible by {pieces} ({' x '.join(factors)}); nearest that are: "
            f"{_nearest(length, pieces)}"
        )


def _stage_problems(num_layers: int, layout: ParallelLayout) -> Iterator[str]:
    """Each pipeline chunk holds as many layers as any other, but for the uneven first and last stages."""
    virtual = layout.virtual_pipeline_model_parallel_size or 1
    for key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        layers = getattr(layout, key)
        if layers is not None and layers % virtual:
            yield (
                f"parallel.{key}: {layers} is not divisible by parallel.virtual_pipeline_model_parallel_size "
                f"({virtual}); nearest that are: {_nearest(layers, virtual)}"
            )
    layers, stages = layout.layers_left(num_layers)
    uneven = (
        "" if layers == num_layers else f", of which {num_layers - layers} are in uneven stages,"
    )
    if stages == 0:
        if layers:
            yield (
                f"model.num_layers: {num_layers}{uneven} leaves {layers} for no stage; make parallel."
                "num_layers_in_first_pipeline_stage and ..last.. add up to it, or set one to null"
            )
    elif layers < stages * virtual or layers % (stages * virtual):
        fitting = _nearest(max(layers, 0), stages * virtual, offset=num_layers - layers)
        yield (
            f"model.num_layers: {num_layers}{uneven} is not divisible by the {stages * virtual} pipeline chunks "
            "(parallel.pipeline_model_parallel_size x parallel.virtual_pipeline_model_parallel_size); nearest that "
            f"are: {fitting}"
        )


def _batch_problems(config: RunConfig, replicas: int) -> Iterator[str]:
    train, layout = config.train, config.parallel
    a_round = train.micro_batch_size * replicas
    if train.global_batch_size % a_round:
        yield (
            f"train.global_batch_size: {train.global_batch_size} is not divisible by {a_round} "
            f"(train.micro_batch_size {train.micro_batch_size} x {replicas} replicas); nearest that are: "
            f"{_nearest(train.global_batch_size, a_round)}"
        )
        return
    microbatches, stages = train.global_batch_size // a_round, layout.pipeline_model_parallel_size
    if layout.virtual_pipeline_model_parallel_size and microbatches % stages:
        yield (
            f"train.global_batch_size: makes {microbatches} microbatches, but the interleaved schedule needs a "
            f"multiple of parallel.pipeline_model_parallel_size ({stages}); nearest batch sizes that do: "
            f"{_nearest(train.global_batch_size, a_round * stages)}"
        )
    if train.eval_samples % a_round:
        yield (
            f"train.eval_samples: {train.eval_samples} is not divisible by {a_round} (train.micro_batch_size x "
            f"replicas); nearest that are: {_nearest(train.eval_samples, a_round)}"
        )


def precision_problems(config: RunConfig) -> Iterator[str]:
    """One line for each path or override that does not fit the model and its layout."""
    try:
        plans = config.unit_plans()
    except ConfigError as error:
        yield str(error)
        return
    yield from lora_problems(plans, config.lora)
    yield from plan_problems(
        plans,
        config.precision,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
        tokens=config.data.sequence_length
        // config.parallel.context_parallel_size
        * config.train.micro_batch_size,
    )


def _units_with_scales(config: RunConfig) -> set[str]:
    """Units whose low path quantises with scales of ours."""
    try:
        plans = config.unit_plans()
    except ConfigError:
        return {unit.id for unit in model_units(config.model)}  # precision_problems tells
    families = ("saved", "emulated", "deepseek")
    return {plan.unit.id for plan in plans if PATHS[plan.low].family in families}


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, config.train.steps
    if config.lora.is_on:
        given = {config.lora.base, config.init_from} - {None}
        if not given:
            yield "lora.base: adapters need frozen weights; name a checkpoint, or a run folder"
        elif len(given) > 1:
            yield (
                f"lora.base: {config.lora.base} and init_from {config.init_from} both say where the frozen weights "
                "come from; leave one of them out"
            )
    if config.gnmr.policy == "oracle" and not config.train.oracle_interval:
        yield "gnmr.policy: oracle needs train.oracle_interval, how often it measures; 1 is every step"
    if config.gnmr.mode == "disabled" and config.train.oracle_interval:
        yield "train.oracle_interval: needs units, but gnmr.mode is disabled; set gnmr.mode: monitor"
    if optimizer.decay_steps is None and optimizer.warmup_steps >= steps:
        yield (
            f"optimizer.warmup_steps: {optimizer.warmup_steps} must be below train.steps ({steps}), or set "
            "optimizer.decay_steps"
        )
    planned = config.data.train_samples
    if planned is not None and planned < steps * config.train.global_batch_size:
        yield (
            f"data.train_samples: {planned} is less than train.steps x train.global_batch_size "
            f"({steps * config.train.global_batch_size}); raise it or set it to null"
        )


def _nearest(value: int, multiple: int, *, offset: int = 0) -> str:
    below = value // multiple * multiple
    return ", ".join(str(item + offset) for item in (below, below + multiple) if item > 0)
