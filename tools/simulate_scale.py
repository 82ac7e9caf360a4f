"""What control costs at scale: measured where one machine can, on paper where it takes a cluster.

Measured here: time and memory of `Controller.decide` by number of units.
Computed: sizes of checkpoints and risk matrices of the presets.
Model: the consensus' all-reduce by world size, and control's share of a step of 13B on 1,024 GPUs.
docs/scale.md says what each number means, and what no number here covers.

python tools/simulate_scale.py [--json]
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.precision_plan import model_units
from gnmr_megatron.observability.risk_matrix import risk_matrix_dtype
from gnmr_megatron.training.config import RunConfig
from gnmr_megatron.training.config_files import parse_run, run_parser

ROOT = Path(__file__).parents[1]
UNITS = (16, 160, 1_000, 10_000, 100_000)
BOUNDS = {160: 0.2, 10_000: 2.0}  # milliseconds of a decision
WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
PRESET, GPUS = "llama2_13b", 1_024
VOCAB_SIZE = 32_000  # LLaMA-2's tokenizer, for which the presets are made
ENGINE_NORM_BYTES = 4  # megatron-core reduces one FP32 number
# a rank's generators: the CPU's, the GPU's, and three of the engine's tracker
RANDOM_STATE_BYTES = 5_056 + 4 * 16
MATRIX_STEPS = 100_000


@dataclass(frozen=True)
class Constant:
    """A number of the model that was not measured here, and who says so."""

    value: float
    unit: str
    source: str


NCCL = "https://github.com/NVIDIA/nccl/blob/5067397c2676d5aed50042fc39e5c8ee96eb0027/src/graph/tuning.cc"
CONSTANTS = {
    "base": Constant(6.8, "us", f"{NCCL} baseLatencies, Tree LL"),
    "nvlink_alpha": Constant(0.6, "us a hop", f"{NCCL} hwLatencies NVLINK, Tree LL"),
    "network_alpha": Constant(5.0, "us a hop", f"{NCCL} hwLatencies NET, Tree LL"),
    "nvlink_beta": Constant(
        38.7 / 3.8, "GB/s", f"{NCCL} perChMaxTreeBws Hopper N1, LL a 3.8th: one channel"
    ),
    "network_beta": Constant(
        36.0 / 3.8, "GB/s", f"{NCCL} perChMaxTreeBws Hopper N4, LL a 3.8th: one channel"
    ),
    "peak": Constant(
        989.4e12, "FLOP/s", "https://glennklockwood.com/garden/processors/h100 BF16 dense, H100 SXM"
    ),
    "utilisation": Constant(
        0.48,
        "of peak",
        "https://github.com/NVIDIA/Megatron-LM/blob/0010ab7484337a1089ad9c35a0ce8723ed6b4740/README.md "
        "41 % (2B) to 47-48 % (462B) on H100; the highest makes the step shortest",
    ),
}


@dataclass(frozen=True)
class PublishedSweep:
    """Two rows of an all_reduce_perf that others ran (in place, microseconds)."""

    machine: str
    gpus: int
    gpus_per_node: int
    small: tuple[int, float]
    large: tuple[int, float]
    source: str


OCI = "https://github.com/oracle-quickstart/oci-hpc-oke"
PUBLISHED = (
    PublishedSweep(
        "8 H20, one node",
        8,
        8,
        (8, 12.50),
        (2_048, 15.84),
        "https://github.com/deepseek-ai/DeepEP/issues/303",
    ),
    PublishedSweep(
        "2 x 8 A100, RDMA",
        16,
        8,
        (8, 34.74),
        (2_048, 41.29),
        f"{OCI}/blob/001cbb9b5ee7cdd5aff4b37c6b1448618107e55f/README.md",
    ),
    PublishedSweep(
        "2 x 8 H100, GPUDirect-TCPX",
        16,
        8,
        (8, 123.5),
        (2_048, 124.6),
        "https://github.com/lessizzmore/create-a3mega-ztan-fork/blob/"
        "02dd8f455c43ced1cf442ef29334bda97149264b/ztan-NCCL-test-result",
    ),
    PublishedSweep(
        "32 x 4 GB200, two racks",
        128,
        4,
        (8, 184.74),
        (2_048, 196.26),
        f"{OCI} (an earlier README.md)",
    ),
)


def some_units(num_units: int) -> UnitTable:
    return UnitTable(
        Unit(i // 4, i % 4, f"decoder.layers.{i // 4}.linear_{i % 4}", (8, 8))
        for i in range(num_units)
    )


def decide_often(controller: Controller, steps: int) -> list[float]:
    """Milliseconds of each of `steps` decisions."""
    draw, milliseconds = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        norms = draw.lognormal(sigma=0.7, size=len(controller.units))
        started = time.perf_counter()
        controller.decide(norms, step=step)
        milliseconds.append((time.perf_counter() - started) * 1e3)
    return milliseconds


def measure_decide(num_units: int, steps: int) -> dict[str, float]:
    """Time of a decision (median, its 95 % bootstrap interval, p99), memory held, bytes in a checkpoint."""
    config, units = ControlConfig(max_recovered=8), some_units(num_units)
    times = np.array(decide_often(Controller(config, units), steps))
    draws = np.random.default_rng(0).choice(times, size=(1000, steps))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    tracemalloc.start()
    controller = Controller(config, units)
    decide_often(controller, config.delta + 1)
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "units": num_units,
        "median_ms": float(np.median(times)),
        "low_ms": float(low),
        "high_ms": float(high),
        "p99_ms": float(np.quantile(times, 0.99)),
        "held_bytes": held_bytes,
        "saved_bytes": saved_bytes(controller),
    }


def saved_bytes(controller: Controller) -> int:
    """Bytes of the controller's state as a checkpoint holds it."""
    file = io.BytesIO()
    torch.save(controller.state_dict(), file)
    return file.tell()


def consensus_bytes(num_units: int) -> int:
    """The risk vector: a float64 for each unit, and one for the rest of the model."""
    return 8 * (num_units + 1)


def all_reduce_us(num_bytes: int, world_size: int, *, gpus_per_node: int = 8) -> float:
    """Microseconds of an all-reduce over a tree of nodes, each a chain of GPUs, up and down.

    base + 2 (g - 1) (a_nvlink + n / b_nvlink) + 2 ceil(log2 nodes) (a_network + n / b_network)

    NCCL's own hops and latencies (tuning.cc). It pipelines the bytes, so it counts n / b only twice; here every hop
    waits for all bytes of the one before.
    """
    in_node = min(world_size, gpus_per_node)
    nodes = math.ceil(world_size / in_node)
    time_us = CONSTANTS["base"].value
    for link, hops in (("nvlink", in_node - 1), ("network", math.ceil(math.log2(nodes)))):
        wire_us = num_bytes / CONSTANTS[f"{link}_beta"].value / 1e3
        time_us += 2 * hops * (CONSTANTS[f"{link}_alpha"].value + wire_us)
    return time_us


def model_all_reduce(num_units: int, world_size: int, *, model_parallel: int) -> dict[str, float]:
    """The consensus against the norm reduction that it replaces.

    With the distributed optimizer megatron-core reduces its norm over all ranks as well, so latencies cancel; without
    it over the `model_parallel` ranks of a replica, and they do not.
    """
    consensus = all_reduce_us(consensus_bytes(num_units), world_size)
    return {
        "world_size": world_size,
        "consensus_us": consensus,
        "engine_us": all_reduce_us(ENGINE_NORM_BYTES, world_size),
        "extra_us": consensus - all_reduce_us(ENGINE_NORM_BYTES, world_size),
        "extra_plain_us": consensus
        - all_reduce_us(ENGINE_NORM_BYTES, min(world_size, model_parallel)),
    }


def compare_published(sweep: PublishedSweep) -> dict[str, Any]:
    """What the model says of a machine that others measured."""
    small, large = (
        all_reduce_us(size, sweep.gpus, gpus_per_node=sweep.gpus_per_node)
        for size in (sweep.small[0], sweep.large[0])
    )
    return {
        "machine": sweep.machine,
        "bytes": f"{sweep.small[0]} -> {sweep.large[0]}",
        "measured_us": sweep.small[1],
        "model_us": small,
        "measured_extra_us": sweep.large[1] - sweep.small[1],
        "model_extra_us": large - small,
        "source": sweep.source,
    }


def step_seconds(parameters: int, tokens: int, gpus: int) -> float:
    """6 x parameters x tokens over what the GPUs do in a second."""
    flops = gpus * CONSTANTS["utilisation"].value * CONSTANTS["peak"].value
    return 6 * parameters * tokens / flops


def model_step(
    run: RunConfig, decide: dict[str, float], all_reduce: dict[str, float]
) -> dict[str, float]:
    """Control's share of a step; the bound counts the whole all-reduce, as if it replaced none."""
    gpus = int(all_reduce["world_size"])
    tokens = run.train.global_batch_size * run.data.sequence_length
    step_us = step_seconds(run.model.num_parameters(VOCAB_SIZE), tokens, gpus) * 1e6
    decide_us = decide["median_ms"] * 1e3
    return {
        "gpus": gpus,
        "tokens": tokens,
        "step_ms": step_us / 1e3,
        "decide_us": decide_us,
        "extra_us": all_reduce["extra_us"],
        "share_percent": 100 * (decide_us + all_reduce["extra_us"]) / step_us,
        "plain_share_percent": 100 * (decide_us + all_reduce["extra_plain_us"]) / step_us,
        "bound_percent": 100 * (decide_us + all_reduce["consensus_us"]) / step_us,
    }


def checkpoint_bytes(model: LlamaConfig, *, vocab_size: int, ranks: int) -> dict[str, int]:
    """Bytes of what a BF16 run on GPUs saves, without headers (2 kB a tensor)."""
    parameters = model.num_parameters(vocab_size)
    units = UnitTable(model_units(model))
    controller = Controller(ControlConfig(), units)
    decide_often(controller, 2)
    parts = {
        "weights": 2 * parameters,
        "main_parameters": 4 * parameters,
        "moments": 2 * 4 * parameters,
        "random": ranks * RANDOM_STATE_BYTES,
        "controller": saved_bytes(controller),
    }
    return {**parts, "total": sum(parts.values())}


def preset_sizes() -> list[dict[str, Any]]:
    """Checkpoint and risk matrix of each BF16 preset, smallest first."""
    rows = []
    for path in (ROOT / "configs/models").glob("llama2_*.yaml"):
        model = LlamaConfig(**yaml.safe_load(path.read_text()))
        units = len(model_units(model))
        rows.append(
            {
                "preset": path.stem,
                "parameters": model.num_parameters(VOCAB_SIZE),
                "units": units,
                **checkpoint_bytes(model, vocab_size=VOCAB_SIZE, ranks=GPUS),
                "risk_matrix": MATRIX_STEPS * risk_matrix_dtype(units).itemsize,
            }
        )
    return sorted(rows, key=lambda row: row["parameters"])


def simulate(steps: int) -> dict[str, Any]:
    """All tables, in plain values."""
    parser = run_parser("simulate_scale", description="", epilog="")
    run, _ = parse_run(parser, ["--config", str(ROOT / f"configs/runs/{PRESET}.yaml")])
    num_units, layout = len(model_units(run.model)), run.parallel
    replica = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    decide = {units: measure_decide(units, steps) for units in UNITS}
    all_reduce = {
        world_size: model_all_reduce(num_units, world_size, model_parallel=replica)
        for world_size in WORLD_SIZES
    }
    return {
        "measured": {"decide": list(decide.values())},
        "computed": {"presets": preset_sizes()},
        "model": {
            "constants": {name: asdict(constant) for name, constant in CONSTANTS.items()},
            "consensus_bytes": {units: consensus_bytes(units) for units in UNITS},
            "all_reduce": list(all_reduce.values()),
            "published": [compare_published(sweep) for sweep in PUBLISHED],
            "step": model_step(run, decide[num_units], all_reduce[GPUS]),
        },
    }


def print_tables(result: dict[str, Any]) -> None:
    """The tables for people, each with where its numbers come from."""
    model = result["model"]
    console = Console(width=None if Console().is_terminal else 160)
    for title, rows in (
        ("MEASURED here: one decision", result["measured"]["decide"]),
        (
            f"COMPUTED: bytes of a checkpoint of {GPUS:,} ranks, and of {MATRIX_STEPS:,} steps' risk matrix",
            result["computed"]["presets"],
        ),
        (f"MODEL: all-reduces of {PRESET}, microseconds", model["all_reduce"]),
        ("MODEL against what others measured", model["published"]),
        (f"MODEL: {PRESET} on {GPUS:,} GPUs", [model["step"]]),
        (
            "Constants of the model",
            [{"name": name, **row} for name, row in model["constants"].items()],
        ),
    ):
        table = Table(*rows[0], title=title, title_justify="left", box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*(shown(value) for value in row.values()))
        console.print(table)


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> int:
    """Measure, compute, print, and fail where a bound on the decision is not held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="decisions to time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = simulate(options.steps)
    if options.json:
        print(json.dumps(result))
    else:
        print_tables(result)
    medians = {row["units"]: row["median_ms"] for row in result["measured"]["decide"]}
    return int(any(medians[num_units] > bound for num_units, bound in BOUNDS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
