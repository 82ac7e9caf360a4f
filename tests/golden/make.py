"""Makes the golden traces from the slow reference."""

import math
import random
from pathlib import Path

from tests.references.control_reference import write_golden_trace

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
    "schedules": {**BASE, "alpha": {0: 3.0, 40: 1.5}, "max_recovered": {0: 1, 30: 4}},
    "two_sided_ema": {**BASE, "collapse_ratio": 0.4, "mean": "ema", "ema_decay": 0.9},
    "window": {**BASE, "mean": "window", "window": 8, "lock_steps": 0},
}


def norms(draw, step):
    values = [math.exp(draw.gauss(0, 0.4)) / (1 + step / 30) for _ in range(6)]
    if step % 11 == 0:
        values[draw.randrange(6)] *= 10
    if step == 17:
        values[2] = math.nan
    if step in (25, 26, 27):
        values[4] = 0.0
    return values


def main():
    for name, settings in TRACES.items():
        draw = random.Random(name)
        steps = [{"norms": norms(draw, step), "updated": step != 17} for step in range(1, 61)]
        write_golden_trace(Path(__file__).with_name(f"{name}.json"), settings, steps)


if __name__ == "__main__":
    main()
