"""What one decision costs: time of `Controller.decide` and size of its state, by number of units.

python tools/benchmark_decide.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable

BOUNDS = {160: 0.2, 10_000: 2.0}  # milliseconds


def measure(num_units: int, steps: int) -> dict[str, float]:
    """Milliseconds of a decision, and bytes of its state as JSON."""
    units = UnitTable(
        Unit(i // 4, i % 4, f"decoder.layers.{i // 4}.linear_{i % 4}", (8, 8))
        for i in range(num_units)
    )
    controller = Controller(ControlConfig(max_recovered=8), units)
    draw, seconds = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        norms = draw.lognormal(sigma=0.7, size=num_units)
        started = time.perf_counter()
        controller.decide(norms, step=step)
        seconds.append(time.perf_counter() - started)
    return {
        "median_ms": float(np.median(seconds) * 1e3),
        "p90_ms": float(np.quantile(seconds, 0.9) * 1e3),
        "state_bytes": len(json.dumps(controller.state_dict())),
    }


def main() -> int:
    """Measure, print, and fail where a bound is not held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    results = {num_units: measure(num_units, options.steps) for num_units in (160, 10_000, 100_000)}
    if options.json:
        print(json.dumps(results))
    else:
        print("  units  median ms     p90 ms  state bytes  bound ms")
        for num_units, row in results.items():
            bound = BOUNDS.get(num_units, "-")
            print(
                f"{num_units:7} {row['median_ms']:10.4f} {row['p90_ms']:10.4f} {row['state_bytes']:12,} {bound:>9}"
            )
    return int(any(results[num_units]["median_ms"] > bound for num_units, bound in BOUNDS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
