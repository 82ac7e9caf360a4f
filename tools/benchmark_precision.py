"""What precision paths cost: kernels against a copy, memory against BF16, training steps against each other.

    python tools/benchmark_precision.py kernels  pack, unpack and round, eager and fused, over a copy of the same bytes
    python tools/benchmark_precision.py gemm     a linear's forward and backward at LLaMA-7B's shapes, over BF16
    python tools/benchmark_precision.py memory   what linears and a whole training step keep for the backward
    python tools/benchmark_precision.py step     a LLaMA's step on the low path, with recovered units, and in BF16

What is compared alternates in one run, in an order drawn anew each round; shown are medians over rounds of the ratio
within a round, with a 95 % interval (bootstrap). Runs on the GPU where there is one. `--json` ends with one object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch

from gnmr_megatron.control.controller import DisabledController
from gnmr_megatron.models.discovery import unwrap
from gnmr_megatron.models.recoverable_linear import RecoverableColumnLinear, RecoverableRowLinear
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.fusion import use_fused_kernels
from gnmr_megatron.precision.linear import linear
from gnmr_megatron.precision.quantization import Quantization, pack, round_blocks, unpack
from gnmr_megatron.precision.registry import FORMATS, precision_path
from gnmr_megatron.training.config_files import parse_run, run_parser
from gnmr_megatron.training.setup import set_up

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS = [name for name, info in PATHS.items() if info.family != "te"]


def interval(ratios):
    """Median and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, size=(2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def interleaved(functions, rounds):
    """Seconds of each function, [rounds] each."""
    seconds = {name: [] for name in functions}
    order = np.random.default_rng(0)
    for round_number in range(rounds + 2):  # the first rounds warm up and compile
        for name in order.permutation(list(functions)):
            synchronize()
            started = time.perf_counter()
            functions[name]()
            synchronize()
            if round_number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: np.array(values) for name, values in seconds.items()}


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def kernels(options):
    """Times over that of copying the BF16 input (pack), output (unpack), or input and FP32 output (round)."""
    x = torch.randn(options.tokens, 1024, device=DEVICE).bfloat16()
    wide = x.float()
    figures = {}
    print(
        f"{DEVICE}, {options.tokens} x 1024 BF16, {torch.get_num_threads()} threads; times over a copy"
    )
    print(f"{'format':10} {'kernels':6} {'pack':>24} {'unpack':>24} {'round':>24}")
    for name, number_format in FORMATS.items():
        how = Quantization(number_format, 1, 128)
        packed = pack(x, how)
        for is_fused in (False, True):
            if use_fused_kernels(enabled=is_fused, device=DEVICE) != is_fused:
                continue
            seconds = interleaved(
                {
                    "copy": x.clone,
                    "copy FP32": wide.clone,
                    "pack": lambda how=how: pack(x, how),
                    "unpack": lambda packed=packed: unpack(packed, torch.bfloat16),
                    "round": lambda how=how: round_blocks(x, how),
                },
                options.rounds,
            )
            copies = {"pack": "copy", "unpack": "copy", "round": "copy FP32"}
            ratios = {what: interval(seconds[what] / seconds[copies[what]]) for what in copies}
            kind = "fused" if is_fused else "eager"
            figures[f"{name} {kind}"] = ratios
            cells = ("{:7.1f} [{:.1f}, {:.1f}]".format(*ratios[what]) for what in copies)
            print(f"{name:10} {kind:6} " + " ".join(f"{cell:>24}" for cell in cells), flush=True)
    return figures


# [in, out] of LLaMA-7B's projections
SHAPES = {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 22016), "fc2": (11008, 4096)}


def gemm(options):
    """Forward and backward of one linear, times over that in BF16; their own quantisation included."""
    use_fused_kernels(enabled=not options.eager, device=DEVICE)
    names = ("bf16", "saved_int8", "saved_int4", "torch_fp8_tensorwise", "torch_fp8_rowwise")
    paths = {name: precision_path(name, PrecisionConfig()) for name in names}
    figures = {}
    for shape, (width, out) in SHAPES.items():
        x = torch.randn(options.tokens // 4, 1, width, device=DEVICE).bfloat16().requires_grad_()
        weight = (torch.randn(out, width, device=DEVICE) / width**0.5).bfloat16().requires_grad_()
        grad_output = torch.randn(options.tokens // 4, 1, out, device=DEVICE).bfloat16()

        def run(path, x=x, weight=weight, grad_output=grad_output):
            torch.autograd.grad(linear(x, weight, path), [x, weight], grad_output)

        functions = {name: (lambda path=path, run=run: run(path)) for name, path in paths.items()}
        seconds = interleaved(functions, options.rounds)
        figures[shape] = {n: interval(seconds[n] / seconds["bf16"]) for n in names[1:]}
        cells = ("{} {:.2f} [{:.2f}, {:.2f}]".format(n, *r) for n, r in figures[shape].items())
        print(
            f"{shape:5} {options.tokens // 4} x {width} x {out}, over BF16: " + ", ".join(cells),
            flush=True,
        )
    return figures


def memory(options):
    """What each path keeps of a token, and what a step keeps in all."""
    tokens, width = 4096, 1024
    x = torch.randn(tokens, 1, width, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(256, width, device=DEVICE).bfloat16().requires_grad_()
    figures = {"linear": {}, "step": {}}
    print(f"{'path':22} {'bytes a token':>14} {'of BF16':>9} {'over the limit of its bits':>27}")
    for name in OURS:
        path = precision_path(name, PrecisionConfig())
        with Kept() as kept:
            linear(x, weight, path)
        per_token = kept.num_bytes(without=[weight]) / tokens
        limit = width * PATHS[name].bits / 8
        figures["linear"][name] = {
            "bytes_per_token": per_token,
            "over_limit": per_token / limit - 1,
        }
        print(
            f"{name:22} {per_token:14.2f} {per_token / (2 * width):9.1%} {per_token / limit - 1:27.1%}"
        )

    trainer = build(options, "saved_int4", "saved_int8")
    batches = trainer.batches.next_step()[:1]
    linears = recoverable(trainer)
    print(f"\nkept between forward and backward of a microbatch of {options.config}:")
    for name in (
        "bf16",
        "saved_int8",
        "saved_int4",
        "deepseek_fp8",
        "deepseek_fp6",
        "torch_fp8_tensorwise",
    ):
        set_paths(linears, name)
        total, inputs, shared = step_memory(trainer, batches, linears)
        figures["step"][name] = {"kept": total, "linears": inputs, "kept_elsewhere_too": shared}
        first = figures["step"]["bf16"]["kept"]
        print(
            f"{name:22} {total / 1e6:9.2f} MB ({total / first:.1%} of bf16); by linears {inputs / 1e6:.2f} MB, of "
            f"that kept by others, too: {shared / 1e6:.2f} MB",
            flush=True,
        )
    return figures


class Kept:
    """Storages of all tensors that are kept for the backward within the block."""

    def __enter__(self):
        self.storages = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _keep(self, tensor):
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage.data_ptr(), [storage, 0])[1] += 1
        return tensor

    def num_bytes(self, *, without):
        """Bytes, each storage once, without those of some tensors."""
        left_out = {tensor.untyped_storage().data_ptr() for tensor in without}
        return sum(
            s.nbytes() for pointer, (s, _) in self.storages.items() if pointer not in left_out
        )


def step_memory(trainer, batches, linears):
    """Bytes kept at the end of the forward of a microbatch: in all, by recoverable linears, and by others as well."""
    parameters = [p for chunk in trainer.step.model.chunks for p in chunk.parameters()]
    by_linears, peak = [], {}
    handles = []
    for module in linears:
        handles.append(
            module.register_forward_pre_hook(lambda *_: by_linears.append(Kept().__enter__()))
        )
        handles.append(
            module.register_forward_hook(lambda *_: by_linears[-1].__exit__(None, None, None))
        )
    forward_step = trainer.step.model._forward_step
    with Kept() as others:

        def stop_before_backward(*arguments):
            output, loss_function = forward_step(*arguments)
            left_out = {p.untyped_storage().data_ptr() for p in parameters}
            inside, outside = {}, {}
            for kept in by_linears:
                inside.update({k: s for k, (s, _) in kept.storages.items() if k not in left_out})
            outside.update({k: s for k, (s, _) in others.storages.items() if k not in left_out})
            peak["kept"] = sum(s.nbytes() for s in {**inside, **outside}.values())
            peak["linears"] = sum(s.nbytes() for s in inside.values())
            peak["shared"] = sum(s.nbytes() for k, s in inside.items() if k in outside)
            return output, loss_function

        trainer.step.model._forward_step = stop_before_backward
        trainer.step.model.zero_grad_buffers()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
        trainer.step.model.forward_backward(batches)
        if DEVICE.type == "cuda":
            print(
                f"allocator's peak over the step: {(torch.cuda.max_memory_allocated() - before) / 1e6:.2f} MB"
            )
    trainer.step.model._forward_step = forward_step
    for handle in handles:
        handle.remove()
    return peak["kept"], peak["linears"], peak["shared"]


@dataclass
class FixedPaths:
    """Stands in for the switchboard, so that paths stay as they were set."""

    def start_step(self, step):
        pass

    def request(self, recovery_set):
        pass


def step(options):
    """Training steps: all units on the low path, `max_recovered` of them recovered, all in BF16."""
    trainer = build(options, options.low, options.recovery)
    fixed = replace(
        trainer.step, controller=DisabledController(trainer.units), switchboard=FixedPaths()
    )
    linears, paths = recoverable(trainer), PrecisionConfig()
    low, recovery, exact = (
        precision_path(name, paths) for name in (options.low, options.recovery, "bf16")
    )
    most = options.max_recovered
    settings = {
        "bf16": [exact] * len(linears),
        "low": [low] * len(linears),
        "recovered": [recovery] * most + [low] * (len(linears) - most),
    }
    functions = {}
    for name, chosen in settings.items():

        def run(chosen=chosen):
            for module, path in zip(linears, chosen, strict=True):
                module.path = path
            fixed(trainer.batches.next_step(), step=1)

        functions[name] = run
    seconds = interleaved(functions, options.rounds)
    figures = {
        "low_over_bf16": interval(seconds["low"] / seconds["bf16"]),
        "recovered_over_low": interval(seconds["recovered"] / seconds["low"]),
    }
    print(
        f"{options.config}, {len(linears)} units, {options.low}/{options.recovery}, {options.rounds} rounds, "
        f"BF16 step {np.median(seconds['bf16']):.3f} s"
    )
    board = trainer.step.switchboard
    sets = itertools.cycle((np.arange(most), np.array([], dtype=np.int64)))

    def switch():
        board.request(next(sets))
        board.start_step(1)

    switching = interleaved({"switch": switch}, 50)["switch"]
    figures["switch_over_step"] = interval(switching / np.median(seconds["bf16"]))
    for name, (median, least, most_) in figures.items():
        print(f"{name.replace('_', ' '):20} {median:.4f} [{least:.4f}, {most_:.4f}]")
    return figures


def build(options, low, recovery):
    arguments = [
        f"--config={options.config}",
        "--data=configs/data/stdlib.yaml",
        "--model.dtype=bf16",
        "--name=benchmark",
        f"--runs_dir={os.environ.get('TMPDIR', '/tmp')}/gnmr_benchmark",
        "--parallel={}",
        f"--data.sequence_length={options.sequence_length}",
        "--train.global_batch_size=4",
        "--train.micro_batch_size=4",
        "--train.eval_interval=0",
        "--train.eval_samples=4",
        "--train.recompute=none",
        f"--train.steps={3 * (options.rounds + 3)}",
        "--optimizer.warmup_steps=1",
        f"--precision.low={low}",
        f"--precision.recovery={recovery}",
        f"--precision.fuse={str(not options.eager).lower()}",
        "--tracking.wandb_mode=disabled",
        "--tracking.console=quiet",
        "--gnmr.warmup_steps=1",
    ]
    config, _ = parse_run(run_parser("benchmark_precision", description="", epilog=""), arguments)
    return set_up(config)


def recoverable(trainer):
    kinds = RecoverableColumnLinear | RecoverableRowLinear
    return [
        module
        for chunk in trainer.step.model.chunks
        for module in unwrap(chunk).modules()
        if isinstance(module, kinds)
    ]


def set_paths(linears, name):
    path = precision_path(name, PrecisionConfig())
    for module in linears:
        module.path = path


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kernels", "gemm", "memory", "step"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16384, help="rows of the kernels' matrix")
    parser.add_argument("--threads", type=int, help="CPU threads; all by default")
    parser.add_argument("--config", default="configs/runs/llama2_60m.yaml")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--low", default="saved_int4")
    parser.add_argument("--recovery", default="saved_int8")
    parser.add_argument("--max-recovered", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="no fused kernels in memory and step")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # the engine's
    if options.threads:
        torch.set_num_threads(options.threads)
    figures = {"kernels": kernels, "gemm": gemm, "memory": memory, "step": step}[options.what](
        options
    )
    if options.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
