"""From a RunConfig to a Trainer, in the order in which the parts need each other."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller, DecidesRecovery, DisabledController
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.data.batches import GivesBatches
from gnmr_megatron.data.dataset import open_datasets
from gnmr_megatron.data.manifest import describe_datasets
from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.consensus import EngineNorm, MeasuresNorms, RiskConsensus
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.ownership import OwnedGradient, owned_by_unit
from gnmr_megatron.distributed.process_groups import (
    own_store,
    start_process_groups,
)
from gnmr_megatron.distributed.watchdog import Watchdog
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.models import te_adapter
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.llama import (
    DTYPES,
    build_chunks,
    engine_option_problems,
    transformer_config,
)
from gnmr_megatron.models.precision_plan import UnitPlan, uses_te
from gnmr_megatron.models.switchboard import Switchboard, recoverable_units
from gnmr_megatron.models.switches import path_switches
from gnmr_megatron.observability.risk_matrix import recorded_decisions
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.precision.fusion import fused_kernels_are_used
from gnmr_megatron.training.base_weights import load_base_and_add_adapters
from gnmr_megatron.training.checkpoint import Checkpointer
from gnmr_megatron.training.config import RunConfig, TrainSettings, validate
from gnmr_megatron.training.evaluation import Evaluation
from gnmr_megatron.training.faults import FaultInjection
from gnmr_megatron.training.identity import run_identity
from gnmr_megatron.training.initial_weights import base_weights, initial_weights, lora_identity
from gnmr_megatron.training.loop import Trainer, TrainingBatches
from gnmr_megatron.training.optimizer import ClippingOptimizer, build_optimizer, build_scheduler
from gnmr_megatron.training.oracle import LooksAhead, NoOracle, Oracle
from gnmr_megatron.training.pipeline import PipelinedModel, RunsBatches
from gnmr_megatron.training.recorder import NullRecorder, RecordsRun, RunRecorder
from gnmr_megatron.training.resume import agree_on_folder, resume
from gnmr_megatron.training.run_folder import RunFolder
from gnmr_megatron.training.saving import Saving
from gnmr_megatron.training.state import TrainState
from gnmr_megatron.training.step import TrainStep
from gnmr_megatron.training.supervision import end_hanging_run, tell_slow_step


def set_up(config: RunConfig) -> Trainer:
    """Join the process groups and build all parts of the run on this rank.

    Raises:
        GnmrError: settings, data or checkpoint do not fit; raised alike on every rank.
    """
    data = describe_datasets(config.data)
    validate(config, world_size=int(os.environ.get("WORLD_SIZE", "1")), vocab_size=data.vocab_size)
    if config.resume is None:
        initial_weights(config, data)
    base = base_weights(config, data)
    plans = config.unit_plans()
    if data.kind == "instruction" and uses_te(plans):
        raise ConfigError(
            "data.datasets: instruction data is packed, and the attention of te_* paths would see across examples; "
            "take other precision.low and precision.recovery paths"
        )
    engine = checked_engine(config, plans)
    device = start_process_groups(
        config.parallel, seed=config.seed, timeout=timedelta(minutes=config.train.timeout_minutes)
    )
    folder = agree_on_folder(config)
    models = build_chunks(
        config.model,
        engine,
        vocab_size=data.vocab_size,
        sequence_length=config.data.sequence_length,
        seed=config.seed,
        device=device,
        uses_te=uses_te(plans),
    )
    ids = {plan.unit.id for plan in plans}
    if base is not None:
        load_base_and_add_adapters(base, models, config.lora, ids=ids, seed=config.seed)
    chunks = _wrap(models, engine, config.parallel)
    optimizer = build_optimizer(
        chunks, config.optimizer, config.parallel, DTYPES[config.model.dtype]
    )
    scheduler = build_scheduler(optimizer, config.optimizer, steps=config.train.steps)
    connect_engine(engine, chunks, optimizer, config.parallel)

    units = recoverable_units(plans)
    linears = local_linears(chunks, ids)
    controller = _controller(config.gnmr, units)
    switchboard = Switchboard(
        plans, path_switches(config.precision, plans, linears, device), seed=config.seed
    )
    checkpointer = Checkpointer(
        folder.checkpoints,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        controller=controller,
        layout=config.parallel,
        identity=run_identity(
            config.model,
            tokenizer=data.tokenizer_fingerprint,
            vocab_size=data.vocab_size,
            units=units.fingerprint,
            seed=config.seed,
            **lora_identity(config.lora, base),
        ),
        settings=config.checkpoint,
        base=base,
    )
    initial = None if folder.candidates else initial_weights(config, data)
    state, troubles = resume(config, folder, checkpointer, controller, initial=initial)
    switchboard.request(controller.recovery_set)

    model = PipelinedModel(
        chunks,
        sequence_length=config.data.sequence_length,
        micro_batch_size=config.train.micro_batch_size,
        device=device,
    )
    datasets = open_datasets(
        config.data,
        data,
        train_samples=state.train_samples,
        valid_samples=config.train.eval_samples,
        seed=config.seed,
    )
    recorder = _recorder(
        config, folder, units, state, vocab_size=data.vocab_size, troubles=troubles, device=device
    )
    batches: GivesBatches = TrainingBatches.of(
        datasets.train, config.train, state, num_workers=config.data.num_workers
    )
    trained: RunsBatches = model
    if config.faults:
        batches = trained = FaultInjection(
            config.parsed_faults(),
            batches=batches,
            model=model,
            optimizer=optimizer,
            linears=linears,
            low_paths={plan.unit.id: plan.low for plan in plans},
            recorder=recorder,
            folder=folder.path,
            rank=dist.get_rank(),
            step=state.step,
            vocab_size=data.vocab_size,
        )
    owned = owned_by_unit(chunks, optimizer.engine, units, linears)
    step = TrainStep(
        trained,
        optimizer,
        scheduler,
        _norms(config.gnmr, optimizer, units, owned, device),
        controller,
        switchboard,
    )
    watchdog = _watchdog(config.train, recorder)
    return Trainer(
        settings=config.train,
        check_interval=config.gnmr.check_interval,
        state=state,
        step=step,
        batches=batches,
        evaluation=Evaluation.of(
            datasets.valid,
            config.train,
            model,
            switchboard,
            on_recovery=config.gnmr.mode != "disabled",
        ),
        saving=Saving(
            config.checkpoint, checkpointer, recorder, state.step, progress=watchdog.still_there
        ),
        recorder=recorder,
        units=units,
        watchdog=watchdog,
        oracle=_oracle(config, plans, model, switchboard, controller, recorder, owned, device),
    )


def checked_engine(config: RunConfig, plans: Sequence[UnitPlan]) -> TransformerConfig:
    """The engine's configuration, and everything about it that can be refused before processes meet.

    Raises:
        GnmrError: an option of the engine, Transformer Engine or this machine's GPU does not fit the paths.
    """
    is_te = uses_te(plans)
    if is_te:
        te_adapter.check_environment(plans)
    refused = list(engine_option_problems(config.parallel.engine_options, uses_te=is_te))
    engine = transformer_config(
        config.model,
        {
            **config.parallel.engine_fields(),
            **config.train.engine_fields(),
            **engine_compat.device_fields("cuda" if torch.cuda.is_available() else "cpu"),
            **(te_adapter.engine_fields(plans) if is_te else {}),
        },
        config.parallel.engine_options,
    )
    if is_te:
        refused += te_adapter.refusals(engine)
    if refused:
        raise ConfigError("\n".join(refused))
    return engine


def connect_engine(
    engine: TransformerConfig,
    chunks: Sequence[DistributedDataParallel],
    optimizer: ClippingOptimizer,
    layout: ParallelLayout,
) -> None:
    """Give the schedule what it calls: gradient finalisation and overlapped communication."""
    engine.grad_scale_func = optimizer.engine.scale_loss
    engine.finalize_model_grads_func = finalize_model_grads
    if layout.overlap_grad_reduce:
        engine.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if layout.overlap_param_gather:
        engine.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def _wrap(
    chunks: Sequence[torch.nn.Module], engine: TransformerConfig, layout: ParallelLayout
) -> list[DistributedDataParallel]:
    """Mixed precision and data parallelism around the chunks; gradients accumulate in FP32."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        typed = Float16Module(engine, chunk) if engine.bf16 else chunk
        wrapped.append(
            DistributedDataParallel(engine, settings, typed, disable_bucketing=index > 0)
        )
    return wrapped


def _controller(settings: ControlConfig, units: UnitTable) -> DecidesRecovery:
    if settings.mode == "disabled":
        return DisabledController(units)
    try:
        return Controller(settings, units, recorded=recorded_decisions(settings))
    except ValueError as error:
        raise ConfigError(f"gnmr.trace: {settings.trace}: {error}") from error


def _norms(
    settings: ControlConfig,
    optimizer: ClippingOptimizer,
    units: UnitTable,
    owned: Sequence[OwnedGradient],
    device: torch.device,
) -> MeasuresNorms:
    if settings.mode == "disabled":
        return EngineNorm(optimizer.engine)
    return RiskConsensus(owned, len(units), device)


def _oracle(
    config: RunConfig,
    plans: Sequence[UnitPlan],
    model: RunsBatches,
    switchboard: Switchboard,
    controller: DecidesRecovery,
    recorder: RecordsRun,
    owned: Sequence[OwnedGradient],
    device: torch.device,
) -> LooksAhead:
    if not isinstance(controller, Controller) or not config.train.oracle_interval:
        return NoOracle()
    families = {PATHS[path].family for plan in plans if not plan.is_fixed for path in plan.paths}
    dtypes = {path for plan in plans for path in plan.paths if PATHS[path].family == "exact"}
    return Oracle(
        config.train.oracle_interval,
        model=model,
        owned=owned,
        units=controller.units,
        switchboard=switchboard,
        controller=controller,
        record=recorder.recovery_gaps,
        device=device,
        # their forward, and their gradient of the input, are exact
        is_separable=families <= {"saved", "exact"} and dtypes <= {config.model.dtype},
    )


def _watchdog(settings: TrainSettings, recorder: RecordsRun) -> Watchdog:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Watchdog(
        own_store(),
        rank=rank,
        world_size=world_size,
        hang_seconds=settings.hang_timeout_seconds,
        on_slow=tell_slow_step(recorder),
        on_hang=end_hanging_run(
            recorder,
            rank=rank,
            world_size=world_size,
            hang_seconds=settings.hang_timeout_seconds,
        ),
    )


def _recorder(
    config: RunConfig,
    folder: RunFolder,
    units: UnitTable,
    state: TrainState,
    *,
    vocab_size: int,
    troubles: Sequence[tuple[str, str]],
    device: torch.device,
) -> RecordsRun:
    if dist.get_rank() != 0:
        return NullRecorder()
    recorder = RunRecorder.open(
        config,
        folder,
        units,
        state,
        vocab_size=vocab_size,
        world_size=dist.get_world_size(),
        environment=_environment(device),
    )
    for kind, message in troubles:
        recorder.fault(state.step, kind=kind, message=message)
    return recorder


def _environment(device: torch.device) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "gnmr_megatron": version("gnmr-megatron"),
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or "cpu",
        "host": platform.node(),
        **{f"kernels.{what}": name for what, name in engine_compat.kernels_in_use(device).items()},
        "kernels.quantization": "fused" if fused_kernels_are_used() else "eager",
    }
