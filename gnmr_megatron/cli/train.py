"""`gnmr-megatron train`: train here, or start the processes that the layout needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gnmr_megatron.data.manifest import describe_datasets
from gnmr_megatron.training.config import RunConfig, validate
from gnmr_megatron.training.config_files import parse_run, run_parser, with_resume
from gnmr_megatron.training.initial_weights import initial_weights

DESCRIPTION = """\
Train a LLaMA with low-precision linears; between steps, GNMR decides which few of them run on the recovery
path.

Settings come from a YAML file and dotted options; later ones win. Under torchrun this is one rank of many;
without it, the processes that `parallel` asks for are started on this machine."""

EPILOG = """\
examples:
  gnmr-megatron train --config configs/runs/quickstart.yaml
  gnmr-megatron train --config configs/runs/quickstart.yaml --model.num_layers 8 --gnmr.alpha 2.5
  gnmr-megatron train --resume runs/quickstart
  gnmr-megatron train --config configs/runs/quickstart.yaml --name finetune --init_from runs/quickstart
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m gnmr_megatron train --config configs/runs/llama2_7b.yaml

The run folder holds config.yaml, events.jsonl, risk_matrix.bin, units.json, checkpoints/ and wandb/.
SIGTERM saves a checkpoint after the current step and exits with 0; --resume RUN goes on with equal losses,
with the settings of RUN unless --config gives others."""


def run(arguments: Sequence[str]) -> int:
    """Train, on this rank or on processes started for it."""
    parser = run_parser("gnmr-megatron train", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object of the run's summary at the end, and nothing else on standard output",
    )
    config, options = parse_run(parser, with_resume(arguments))
    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    if world_size == 0:
        data = describe_datasets(config.data)
        validate(
            config,
            world_size=config.parallel.default_world_size,
            vocab_size=data.vocab_size,
        )
        if config.resume is None:
            initial_weights(config, data)
        if config.parallel.default_world_size > 1:
            from gnmr_megatron.training.launch import start_processes

            command = ("-m", "gnmr_megatron", "train", *arguments)
            return start_processes(command, config.parallel.default_world_size)
    return _train(config, as_json=options.json)


def _train(config: RunConfig, *, as_json: bool) -> int:
    # imported here: settings are checked before torch and megatron-core are loaded
    from gnmr_megatron.training.run import train

    report = train(config, quiet=as_json)
    if report is not None:
        sys.stdout.write(report.as_json() + "\n" if as_json else report.as_text() + "\n")
    return 0
