"""Three ranks decide; rank 1 saw another norm. Each prints what the check tells it."""

import os

import numpy as np
import torch.distributed as dist

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.distributed.consensus import verify_decision
from gnmr_megatron.errors import ConsensusError


def main():
    dist.init_process_group("gloo")
    units = UnitTable(
        Unit(layer, 0, f"decoder.layers.{layer}.mlp.linear_fc1", (8, 8)) for layer in range(4)
    )
    controller = Controller(
        ControlConfig(policy="top_norm", warmup_steps=0, max_recovered=1), units
    )
    norms = np.arange(4.0)
    verify_decision(controller.decide(norms, step=1))  # all alike
    if dist.get_rank() == 1:
        norms[0] = 9.0
    try:
        verify_decision(controller.decide(norms, step=2))
    except ConsensusError as error:
        os.write(1, f"rank {dist.get_rank()}: {error}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
