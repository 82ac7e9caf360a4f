"""What is evaluated: a checkpoint, and what it and the run around it say of the model; no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from gnmr_megatron.errors import CheckpointError, ConfigError
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.models.precision_plan import plan_units
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.training.checkpoint_files import FOLDER, CheckpointDescription
from gnmr_megatron.training.companions import Companions, companions_of
from gnmr_megatron.training.config import RunConfig, TrainSettings, validate
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.harness.options import EvaluationOptions, PathChoice
from gnmr_megatron.training.identity import LORA_RANK, saved_model
from gnmr_megatron.training.initial_weights import find_checkpoint, fingerprint


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint that is there, with a layout that fits it.

    Attributes:
        checkpoint: its folder.
        step: steps done.
        base: checkpoint under adapters, or None.
        run: settings of the run that saved it, or None where there is none around it or they do not matter.
        config: settings to build the model with.
        vocab_size: entries of the vocabulary, without padding.
        companions: tokenizer, and fields of config.json.
        path: what the linears run on.
        max_length: longest prompt in tokens.
        length_multiple: prompts are padded to a multiple of it, as the path needs.
    """

    checkpoint: Path
    step: int
    base: Path | None
    run: RunConfig | None
    config: RunConfig
    vocab_size: int
    companions: Companions
    path: PathChoice
    max_length: int
    length_multiple: int


def find_subject(options: EvaluationOptions, *, world_size: int) -> Subject:
    """Look a checkpoint up, and check that options and layout fit it.

    Raises:
        ConfigError: there is no checkpoint, or something does not fit; nothing was loaded.
    """
    try:
        path = find_checkpoint(options.checkpoint)
        description = CheckpointDescription.read(path)
        base = _base(path, description, options.base)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    identity = description.identity
    companions = companions_of(
        path, files_from=options.files_from, fingerprint=identity.get("tokenizer")
    )
    if companions.tokenizer is None:
        raise ConfigError(
            f"{path}: no tokenizer came with it; give a folder that has it: --files-from FOLDER"
        )
    vocab_size = int(identity.get("vocab_size") or companions.tokenizer.vocab_size)
    model = saved_model(identity)
    run = _run_of(path)
    choice, precision = _precision(options.path, run, model)
    lora = LoraConfig()
    if base is not None:
        lora = LoraConfig(
            rank=identity[LORA_RANK],
            alpha=identity["lora.alpha"],
            units=identity["lora.units"],
            base=str(base),
        )
    multiple = max(
        PATHS[name].multiple for plan in plan_units(model, precision, lora) for name in plan.paths
    )
    max_length = _max_length(options, companions)
    a_round = options.batch_size * options.layout.data_parallel(world_size)
    config = RunConfig(
        model=model,
        lora=lora,
        precision=precision,
        parallel=options.layout,
        seed=RunConfig.seed if run is None else run.seed,
        data=dataclasses.replace(
            RunConfig().data, sequence_length=math.ceil(max_length / multiple) * multiple
        ),
        train=TrainSettings(
            micro_batch_size=options.batch_size, global_batch_size=a_round, eval_samples=a_round
        ),
    )
    validate(config, world_size=world_size, vocab_size=vocab_size)
    return Subject(
        checkpoint=path,
        step=description.step,
        base=base,
        run=run,
        config=config,
        vocab_size=vocab_size,
        companions=companions,
        path=choice,
        max_length=max_length,
        length_multiple=multiple,
    )


def _base(path: Path, description: CheckpointDescription, given: Path | None) -> Path | None:
    """The checkpoint under adapters, where it was in training or where it is now."""
    if not description.identity.get(LORA_RANK):
        return None
    base = find_checkpoint(given or Path(description.state["base"]))
    if fingerprint(CheckpointDescription.read(base)) != description.identity["lora.base"]:
        raise CheckpointError(
            f"{base}: is not the base that the adapters in {path} were trained on; name it with --base"
        )
    return base


def _run_of(path: Path) -> RunConfig | None:
    settings = path.parent.parent / "config.yaml"
    if path.parent.name != FOLDER or not settings.is_file():
        return None
    parser = run_parser("gnmr-megatron evaluate", description="", epilog="")
    return parse_run(parser, ["--config", str(settings)])[0]


def _precision(
    choice: PathChoice | None, run: RunConfig | None, model: LlamaConfig
) -> tuple[PathChoice, PrecisionConfig]:
    if choice is None and run is None:
        choice = model.dtype
    elif choice is None:
        assert run is not None
        choice = "low" if run.gnmr.mode == "disabled" else "recovery"
    if choice in ("bf16", "fp32"):
        return choice, PrecisionConfig(low=choice, recovery=choice)
    if run is None:
        raise ConfigError(
            f"--path {choice}: no run is around the checkpoint, which would say what its {choice} path is; take "
            "--path bf16 or --path fp32"
        )
    return choice, run.precision


def _max_length(options: EvaluationOptions, companions: Companions) -> int:
    made_for = companions.fields.get("max_position_embeddings")
    length = options.max_length or made_for
    if length is None:
        raise ConfigError(
            "--max-length: is needed, because no config.json says how long sequences may be"
        )
    return int(length)
