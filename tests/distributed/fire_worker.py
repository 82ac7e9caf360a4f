"""Four ranks of which one does something odd; each writes what it saw to rank_R.json in the folder of the arguments."""

import json
import math
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.distributed.consensus import RiskConsensus
from gnmr_megatron.distributed.ownership import OwnedGradient
from gnmr_megatron.errors import ConsensusError
from gnmr_megatron.training.config_files import parse_run, run_parser

UNITS = 3  # fewer than ranks: rank 3 has none
STEPS = 8
ODD_STEP, ODD_UNIT = 5, 1
ALPHA = 2.0
# what unit 1's rank reports in step 5 instead of 1; GNMR is the value itself
ODD_NORMS = {
    "nan": math.nan,
    "inf": math.inf,
    "zero": 0.0,
    "at_threshold": 2.0,
    "one_bit_above": float(np.nextafter(np.float32(2), np.float32(3))),
    "one_bit_below": float(np.nextafter(np.float32(2), np.float32(1))),
}
SETTINGS = {"alpha": ALPHA, "beta": 1e9, "delta": 2, "max_recovered": 1, "lock_steps": 1}


def decisions(rank, odd_norm):
    """Recovery sets after each step, and the norms as all ranks know them, in hexadecimal digits."""
    units = UnitTable(
        Unit(layer, 0, f"decoder.layers.{layer}.mlp.linear_fc1", (1, 1)) for layer in range(UNITS)
    )
    controller = Controller(ControlConfig(**SETTINGS, warmup_steps=1), units)
    gradient = torch.ones(1)
    owned = [OwnedGradient(rank, gradient)] if rank < UNITS else []
    consensus = RiskConsensus(owned, UNITS, torch.device("cpu"))
    seen = []
    for step in range(1, STEPS + 1):
        gradient.fill_(odd_norm if (step, rank) == (ODD_STEP, ODD_UNIT) else 1.0)
        norms = consensus.unit_norms()
        decision = controller.decide(
            norms.per_unit, step=step, updated=math.isfinite(norms.global_norm)
        )
        seen.append(
            {
                "norms": [value.hex() for value in norms.per_unit.tolist()],
                "selected": decision.selected.tolist(),
                "fingerprint": decision.fingerprint.hex(),
            }
        )
    return seen


def collectives(trainer):
    """Calls and bytes of a step of megatron-core's own, and of one under control."""
    from tools.benchmark_control import CountCollectives, PlainStep

    found = {}
    for name, step in {"plain": PlainStep(trainer.step), "control": trainer.step}.items():
        with CountCollectives() as counted:
            step(trainer.batches.next_step(), step=1)
        found[name] = {"calls": counted.calls, "bytes": counted.bytes}
    return found


def disagreement(trainer, rank):
    """The error that this rank meets after rank 2 decided by other norms, and seconds since the last decision."""
    decide, started = trainer.step.controller.decide, [0.0]

    def tampered(norms, *, step, updated):
        started[0] = time.perf_counter()
        if rank == 2 and step == 4:
            norms = norms.copy()
            norms[-1] = 1e6
        return decide(norms, step=step, updated=updated)

    trainer.step.controller.decide = tampered
    try:
        trainer.train()
    except ConsensusError as error:
        return {"error": str(error), "seconds": time.perf_counter() - started[0]}


def main(folder, arguments):
    warnings.filterwarnings("ignore")
    from megatron.core import parallel_state

    from gnmr_megatron.training.setup import set_up

    found = {}
    for name in ("count", "disagree"):
        config, _ = parse_run(
            run_parser("worker", description="", epilog=""), [*arguments, f"--name={name}"]
        )
        trainer = set_up(config)
        rank = torch.distributed.get_rank()
        if name == "count":
            found["collectives"] = collectives(trainer)
            found["units"] = len(trainer.units)
            found["decisions"] = {key: decisions(rank, value) for key, value in ODD_NORMS.items()}
        else:
            found["disagreement"] = disagreement(trainer, rank)
        trainer.recorder.close()
        parallel_state.destroy_model_parallel()
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
