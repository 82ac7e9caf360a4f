"""Makes the golden traces from the slow reference."""

import math
import random
from pathlib import Path

from tests.references.control_reference import write_golden_trace

OPERATORS = {
    "self_attention.linear_qkv": [48, 32],
    "self_attention.linear_proj": [32, 32],
    "mlp.linear_fc1": [128, 32],
    "mlp.linear_fc2": [32, 64],
}
UNITS = [
    {"layer": layer, "position": i, "id": f"decoder.layers.{layer}.{operator}", "shape": shape}
    for layer in range(2)
    for i, (operator, shape) in enumerate(OPERATORS.items())
]
BASE = {
    "alpha": 2.0,
    "beta": 1.5,
    "delta": 4,
    "max_recovered": 2,
    "lock_steps": 3,
    "warmup_steps": 5,
}
TRACES = {
    "plain": BASE,
    "schedules": {
        **BASE,
        "mode": "monitor",
        "alpha": {0: 3.0, 40: 1.5},
        "beta": {20: 1.5, 50: 3.0},
        "max_recovered": {0: 1, 22: 4, 60: 0},
    },
    "two_sided_ema": {**BASE, "collapse_ratio": 0.4, "mean": "ema", "ema_decay": 0.9},
    "window": {**BASE, "mean": "window", "window": 8, "lock_steps": 0},
}


def norms(draw, step):
    values = [math.exp(draw.gauss(0, 0.4)) / (1 + step / 30) for _ in UNITS]
    if step % 11 == 0:
        values[draw.randrange(len(UNITS))] *= 10
    if step == 17:
        values[2] = math.nan
    if 25 <= step <= 30:
        values[4] = 0.0
    if step == 38:
        values[1] = values[6] = math.inf
    return values


def main(folder):
    for name, settings in TRACES.items():
        draw = random.Random(name)
        steps = [{"norms": norms(draw, step), "updated": step != 17} for step in range(1, 61)]
        write_golden_trace(folder / f"{name}.json", settings, UNITS, steps)


if __name__ == "__main__":
    main(Path(__file__).parent)
