"""The cases of the layout matrix, how they are run, and the table of what came out.

python -m tests.distributed.layout_matrix    # all cases, and the table in Markdown
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnmr_megatron.observability.events import EvaluationEvent, StepEvent, read_events
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tests.conftest import TINY, options, prepare_tiny_dataset, run_cli

TP2 = {"parallel.tensor_model_parallel_size": 2}
TP4 = {"parallel.tensor_model_parallel_size": 4}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
PP4 = {"parallel.pipeline_model_parallel_size": 4}
CP2 = {"parallel.context_parallel_size": 2}
SP = {"parallel.sequence_parallel": "true"}
VPP2 = {"parallel.virtual_pipeline_model_parallel_size": 2}
UNEVEN = {"parallel.num_layers_in_first_pipeline_stage": 1}
SHARDED = {"parallel.use_distributed_optimizer": "true"}
OVERLAP = {"parallel.overlap_grad_reduce": "true"}
GATHER = {"parallel.overlap_param_gather": "true"}
RECOMPUTE = {"train.recompute": "full"}
LAYOUTS = {
    1: {
        "one": {},
        "accumulate1": {"train.micro_batch_size": 8},
        "accumulate8": {"train.micro_batch_size": 1},
        "recompute": RECOMPUTE,
    },
    2: {
        "tp2": TP2,
        "tp2_sp": TP2 | SP,
        "tp2_sp_recompute": TP2 | SP | RECOMPUTE,
        "pp2": PP2,
        "pp2_vpp2": PP2 | VPP2,
        "pp2_uneven": PP2 | UNEVEN,
        "dp2": {},
        "dp2_overlap": OVERLAP,
        "dp2_sharded": SHARDED,
        "dp2_sharded_overlap": SHARDED | OVERLAP,
        "dp2_sharded_gather": SHARDED | OVERLAP | GATHER,
        "cp2": CP2,
    },
    4: {
        "tp4_sp": TP4 | SP,
        "pp4": PP4,
        "tp2_pp2_sp": TP2 | PP2 | SP,
        "tp2_dp2_sharded": TP2 | SHARDED | OVERLAP,
        "pp2_dp2": PP2,
        "tp2_cp2_sp": TP2 | CP2 | SP,
    },
}
WORLD_SIZES = {name: size for size, layouts in LAYOUTS.items() for name in layouts}
ALL = {name: settings for layouts in LAYOUTS.values() for name, settings in layouts.items()}
MATRIX_STEPS = 60
TESTED_STEPS = 14
EXACT = {"precision.low": "fp32", "precision.recovery": "fp32", "train.micro_batch_size": 4}
PRECISIONS = {
    "exact": EXACT,
    "tied": EXACT | {"model.tie_embeddings": "true"},
    "bf16": {"precision.low": "bf16", "precision.recovery": "bf16", "model.dtype": "bf16"},
    "int4": {"precision.low": "saved_int4", "precision.recovery": "saved_int8"},
    # blocks of 32 values never cross the shards
    "mx": {
        "precision.low": "fp6_e3m2",
        "precision.recovery": "fp8_e4m3",
        "precision.granularity": "mx",
    },
    # a scale spans the whole sequence, but not the features of other ranks
    "fp8": {"precision.low": "torch_fp8_tensorwise", "precision.recovery": "bf16"},
}
LONG_RUNS = ("exact", "tied")
CHECKED = {
    "exact": [name for name in ALL if name != "one"],
    "tied": ["pp2", "tp2_pp2_sp"],
    "bf16": ["tp2", "pp2", "dp2_sharded_gather"],
    "int4": ["tp2_sp", "pp2_vpp2", "dp2_sharded_gather", "cp2", "tp2_pp2_sp", "tp2_cp2_sp"],
    "mx": ["tp2_sp", "pp2", "dp2_sharded_gather", "tp2_pp2_sp"],
    "fp8": ["tp2", "tp2_sp", "pp2"],
}
RECOMPUTED = ("saved_int4", "fp4_e2m1", "deepseek_fp6", "torch_fp8_rowwise")
MODES = {  # of INT4, on one process
    "static_low": {"gnmr.policy": "static_low"},
    "static_high": {"gnmr.policy": "static_high"},
    "monitor": {"gnmr.mode": "monitor"},
    "disabled": {"gnmr.mode": "disabled"},
    "replay": {"gnmr.policy": "replay", "gnmr.trace": "int4.one"},
    "all_int8": {"precision.low": "saved_int8"},
    **{
        f"{path}.{recompute}": {
            "precision.low": path,
            "precision.rounding": "stochastic",
            "precision.group_size": 16,
            "train.recompute": recompute,
            "train.steps": 6,
        }
        for path in RECOMPUTED
        for recompute in ("none", "core_attn", "full")
    },
}
INSTRUCTION_STEPS = 4
INSTRUCTION = {  # layouts on packed examples, whose completions differ in length
    1: {"one": {}, "recompute": RECOMPUTE},
    2: {"dp2": {}, "dp2_sharded_gather": SHARDED | OVERLAP | GATHER, "cp2": CP2, "pp2": PP2},
    4: {"tp2_cp2_sp": TP2 | CP2 | SP},
}
PAIRS = [(precision, layout) for precision, names in CHECKED.items() for layout in names]


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a run to the one-process run, and whether the recovery traces are equal."""

    steps: int
    losses: float
    held_out: float
    norms: float
    same_traces: bool
    recovered: int


def case(name, settings, runs_dir, dataset):
    """Command-line options of a run of the tiny model."""
    where = {"data.datasets": f"[{dataset}]", "runs_dir": runs_dir, "name": name}
    return options({**TINY, **settings, **where})


def mode_case(name, runs_dir, dataset):
    """Options of a run in another mode."""
    settings = PRECISIONS["int4"] | MODES[name]
    if "gnmr.trace" in settings:
        settings["gnmr.trace"] = runs_dir / settings["gnmr.trace"]
    return case(name, settings, runs_dir, dataset)


def matrix_cases(world_size, runs_dir, dataset, *, steps):
    """The cases of one launch; those on exact paths take so many steps."""
    length = {
        "train.steps": steps,
        "optimizer.decay_steps": steps,
        "checkpoint.interval": steps // 2,
        "train.eval_interval": steps // 2,
    }
    return [
        case(
            f"{precision}.{name}",
            settings | layout | (length if precision in LONG_RUNS else {}),
            runs_dir,
            dataset,
        )
        for precision, settings in PRECISIONS.items()
        for name, layout in LAYOUTS[world_size].items()
        if name == "one" or name in CHECKED[precision]
    ]


def prepare_chats(folder, tokenizer_from):
    """An instruction dataset of conversations that differ in length."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"count to {n % 9}"},
                {"role": "assistant", "content": " ".join(map(str, range(n % 9 + 1)))},
            ]
        }
        for n in range(200)
    ]
    file = folder.with_suffix(".jsonl")
    file.write_text("\n".join(map(json.dumps, lines)))
    how = ("--format", "chat", "--workers", 1, "--tokenizer-from", tokenizer_from)
    result = run_cli("prepare-data", file, *how, "--output", folder)
    assert result.returncode == 0, result.stderr
    return folder


def instruction_cases(world_size, runs_dir, chats):
    """The cases of one launch on instruction data."""
    settings = {
        "precision.low": "fp32",
        "precision.recovery": "fp32",
        "data.sequence_length": 128,
        "data.split": "90,10,0",
        "train.steps": INSTRUCTION_STEPS,
        "train.eval_interval": INSTRUCTION_STEPS,
    }
    return [
        case(f"instruction.{name}", settings | layout, runs_dir, chats)
        for name, layout in INSTRUCTION.get(world_size, {}).items()
    ]


def launch(world_size, cases, folder):
    """Train the cases one after the other in so many processes."""
    cases_file = folder / f"cases_{world_size}.json"
    cases_file.write_text(json.dumps(cases))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    result = subprocess.run(
        [sys.executable, *command, Path(__file__).with_name("worker.py"), cases_file],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]


def losses(run):
    """Loss of every step."""
    events = read_events(run / "events.jsonl")
    return np.array([event.loss for event in events if isinstance(event, StepEvent)])


def held_out(run):
    """Loss of every evaluation; 1 where there was none."""
    events = read_events(run / "events.jsonl")
    return np.array([e.loss for e in events if isinstance(e, EvaluationEvent)] or [1.0])


def compare(run, reference):
    """How far a run is from its reference."""
    ours, theirs = read_risk_matrix(run), read_risk_matrix(reference)
    assert ours.units == theirs.units
    norms = np.column_stack((ours.norms, ours.global_norm))
    expected = np.column_stack((theirs.norms, theirs.global_norm))
    return Difference(
        steps=len(theirs.steps),
        losses=_largest(losses(run), losses(reference)),
        held_out=_largest(held_out(run), held_out(reference)),
        norms=_largest(norms, expected),
        same_traces=np.array_equal(ours.selected, theirs.selected)
        and np.array_equal(ours.recovered, theirs.recovered),
        recovered=int(theirs.recovered.sum()),
    )


def _largest(values, expected):
    return float(np.max(np.abs(values / expected - 1)))


def table(runs_dir):
    """The matrix in Markdown."""
    yield "| paths | layout | processes | losses | norms | recovery traces |"
    yield "|---|---|---|---|---|---|"
    for precision, names in CHECKED.items():
        for name in names:
            found = compare(runs_dir / f"{precision}.{name}", runs_dir / f"{precision}.one")
            traces = "equal" if found.same_traces else "differ"
            yield (
                f"| {precision} | {name} | {WORLD_SIZES[name]} | {found.losses:.0e} | {found.norms:.0e} "
                f"| {traces}: {found.recovered} unit-steps in {found.steps} steps |"
            )


def main():
    """Run the matrix and print its table."""
    with tempfile.TemporaryDirectory() as folder:
        runs_dir = Path(folder)
        dataset = prepare_tiny_dataset(runs_dir / "data")
        for world_size in LAYOUTS:
            cases = matrix_cases(world_size, runs_dir, dataset, steps=MATRIX_STEPS)
            launch(world_size, cases, runs_dir)
        print(*table(runs_dir), sep="\n")


if __name__ == "__main__":
    main()
