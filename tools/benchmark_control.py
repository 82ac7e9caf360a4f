"""What control costs a training step, and that it adds no collective.

Four steps alternate on one model, in an order drawn anew each round, so that drift of the machine meets all alike:
  plain    megatron-core as it comes: optimizer.step() with its own norm and clipping
  off      our step with `gnmr.mode: disabled`
  monitor  our step, deciding but never switching
  on       our step, deciding and switching
The ratio of a step is its time over the plain step's time of the same round; shown are the median over rounds and a
95 % interval of it (bootstrap). Forward and backward, which control does not touch, make most of its noise; so the part
after the backward pass, which holds norms, clipping, update and control, is timed apart, and its difference from plain
is shown as a share of the plain step. Collectives and bytes are counted for one rank, at the dispatcher.

    python tools/benchmark_control.py                      the quickstart's model and layout
    python tools/benchmark_control.py --single --rounds 40 the same model in one process
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnmr_megatron.control.controller import Controller, DisabledController
from gnmr_megatron.distributed.consensus import EngineNorm
from gnmr_megatron.distributed.process_groups import stop_process_groups
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.launch import start_processes
from gnmr_megatron.training.setup import set_up

STEPS = ("plain", "off", "monitor", "on")


class CountCollectives(TorchDispatchMode):
    """Counts c10d operations and the bytes of their tensors, point-to-point ones apart."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and not func._opname.startswith(("send", "recv", "barrier")):
            self.calls += 1
            self.bytes += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


@dataclass
class PlainStep:
    """megatron-core's own step, from forward to scheduler."""

    ours: object

    def __call__(self, batches, *, step):
        self.ours.model.zero_grad_buffers()
        self.ours.optimizer.zero_grad()
        self.ours.model.forward_backward(batches)
        self.ours.optimizer.engine.step()
        self.ours.scheduler.step(1)


def build_steps(trainer, gnmr):
    on = trainer.step
    monitor = replace(on, controller=Controller(replace(gnmr, mode="monitor"), trainer.units))
    off = replace(
        on, controller=DisabledController(trainer.units), consensus=EngineNorm(on.optimizer.engine)
    )
    return {"plain": PlainStep(on), "off": off, "monitor": monitor, "on": on}


def measure(trainer, steps, rounds):
    """Seconds of each step, [rounds] each; all ranks wait for each other before a step."""
    seconds, tails = {name: [] for name in STEPS}, {name: [] for name in STEPS}
    stamps = stamp_backward(trainer.step.model)
    order = np.random.default_rng(0)
    number = 0
    for round_number in range(rounds + 2):  # the first rounds warm up
        for name in order.permutation(STEPS):
            number += 1
            batches = trainer.batches.next_step()
            dist.barrier()
            started = time.perf_counter()
            steps[name](batches, step=number)
            ended = time.perf_counter()
            dist.barrier()
            if round_number >= 2:
                seconds[name].append(time.perf_counter() - started)
                tails[name].append(ended - stamps.pop())
    return as_arrays(seconds), as_arrays(tails)


def stamp_backward(model):
    """Times at which backward passes end, on this rank."""
    stamps, forward_backward = [], model.forward_backward

    def stamped(*args, **kwargs):
        result = forward_backward(*args, **kwargs)
        stamps.append(time.perf_counter())
        return result

    model.forward_backward = stamped
    return stamps


def as_arrays(lists):
    return {name: np.array(values) for name, values in lists.items()}


def count(trainer, step):
    with CountCollectives() as counted:
        step(trainer.batches.next_step(), step=1)
    return counted


def interval(ratios):
    """Median and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, size=(2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def main(arguments):
    own = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own.add_argument("--rounds", type=int, default=30)
    own.add_argument("--single", action="store_true", help="one process, whatever the layout")
    own.add_argument("--json", action="store_true", help="end with one JSON object")
    own.add_argument("--config", default="configs/runs/quickstart.yaml")
    options, rest = own.parse_known_args(arguments)
    settings = [
        "--config",
        options.config,
        *rest,
        "--tracking.wandb_mode=disabled",
        "--tracking.console=quiet",
    ]
    if options.single:
        settings += [f"--parallel.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")]
        settings += ["--parallel.sequence_parallel=false"]
    config, _ = parse_run(run_parser("benchmark_control", description="", epilog=""), settings)
    enough = len(STEPS) * (options.rounds + 4) * config.train.global_batch_size
    config = replace(
        config,
        name="benchmark",
        runs_dir=os.environ.get("TMPDIR", "/tmp") + "/gnmr_benchmark",
        train=replace(config.train, steps=math.ceil(enough / config.train.global_batch_size)),
        gnmr=replace(config.gnmr, check_interval=0),
    )
    if config.parallel.default_world_size > 1 and "RANK" not in os.environ:
        return start_processes(
            [str(Path(__file__).resolve()), *arguments], config.parallel.default_world_size
        )

    trainer = set_up(config)
    steps = build_steps(trainer, config.gnmr)
    seconds, tails = measure(trainer, steps, options.rounds)
    plain, on = count(trainer, steps["plain"]), count(trainer, steps["on"])
    if dist.get_rank() == 0:
        report(seconds, tails, plain, on, units=len(trainer.units), as_json=options.json)
    trainer.recorder.close()
    stop_process_groups()
    return 0


def report(seconds, tails, plain, on, *, units, as_json):
    ratios = {name: interval(seconds[name] / seconds["plain"]) for name in STEPS[1:]}
    print(f"{len(seconds['plain'])} rounds, {dist.get_world_size()} processes, {units} units")
    step_seconds = float(np.median(seconds["plain"]))
    extra = {name: interval((tails[name] - tails["plain"]) / step_seconds) for name in STEPS[1:]}
    print(
        f"plain    {step_seconds:.4f} s a step, {np.median(tails['plain']):.4f} s of it after the backward pass"
    )
    for name, (median, low, high) in ratios.items():
        added = "{:+.3%} [{:+.3%}, {:+.3%}]".format(*extra[name])
        print(
            f"{name:8} {median:.4f} of plain [{low:.4f}, {high:.4f}]; after the backward pass {added} of a step"
        )
    print(
        f"collectives a step: plain {plain.calls}, on {on.calls}; bytes: plain {plain.bytes}, on {on.bytes}"
    )
    if as_json:
        figures = {
            "ratio_on": ratios["on"][0],
            "ratio_monitor": ratios["monitor"][0],
            "ratio_off": ratios["off"][0],
            "collectives_on": on.calls,
            "collectives_off": plain.calls,
            "bytes_on": on.bytes,
            "bytes_off": plain.bytes,
            "added_share": {name: list(values) for name, values in extra.items()},
            "spread": {name: [low, high] for name, (_, low, high) in ratios.items()},
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
