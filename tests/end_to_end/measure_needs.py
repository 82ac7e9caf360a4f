"""Trains each case of a JSON file for one step of one microbatch, and prints what its tensors take."""

import json
import sys
import warnings
from pathlib import Path

import torch

from gnmr_megatron.training.config_files import parse_run, run_parser


def storage_bytes(tensors):
    """Bytes of the memory behind tensors, each piece once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def measure(arguments):
    from megatron.core import parallel_state

    from gnmr_megatron.training.setup import set_up

    config, _ = parse_run(run_parser("measure", description="", epilog=""), arguments)
    trainer = set_up(config)
    kept = []  # the tensors themselves, so that no memory is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        trainer.train()
    trainer.recorder.close()
    parameters = [p for chunk in trainer.step.model.chunks for p in chunk.parameters()]
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    optimizer = []
    for single in trainer.step.optimizer.engine.chained_optimizers:
        for group in single.optimizer.param_groups:
            for parameter in group["params"]:
                optimizer += [parameter, *single.optimizer.state[parameter].values()]
    parallel_state.destroy_model_parallel()

    def others(tensors):
        return [x for x in tensors if x.untyped_storage().data_ptr() not in weights]

    return {
        "weights": storage_bytes(parameters),
        "gradients": storage_bytes([parameter.main_grad for parameter in parameters]),
        "optimizer": storage_bytes(others(optimizer)),
        "activations": storage_bytes(others(kept)),
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    cases = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: measure(arguments) for name, arguments in cases.items()}))
