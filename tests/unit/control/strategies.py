"""What the tests of control share: units, random settings and random traces of norms."""

import math

import numpy as np
from hypothesis import strategies as st

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.controller import Controller
from gnmr_megatron.control.units import Unit, UnitTable

CLOSED_LOOP = ["gnmr", "top_norm", "ema_ratio", "zscore"]
OPEN_LOOP = ["static_low", "static_high", "first_last_k", "random", "round_robin"]
POLICIES = CLOSED_LOOP + OPEN_LOOP
MEANS = ["cumulative", "ema", "window"]

THRESHOLDS = st.floats(0.5, 4.0) | st.dictionaries(
    st.integers(0, 60), st.floats(0.5, 4.0), min_size=1, max_size=3
)
BUDGETS = st.integers(0, 5) | st.dictionaries(
    st.integers(0, 60), st.integers(0, 60), min_size=1, max_size=3
)
SETTINGS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["active", "active", "monitor"]),
        "alpha": THRESHOLDS,
        "beta": THRESHOLDS,
        "delta": st.integers(1, 5) | st.just(20),
        "max_recovered": BUDGETS,
        "lock_steps": st.integers(0, 6),
        "warmup_steps": st.integers(0, 8),
        "collapse_ratio": st.none() | st.floats(0.05, 0.9),
        "mean": st.sampled_from(MEANS),
        "history": st.sampled_from(["shared", "shared", "per_path"]),
        "fold_switches": st.sampled_from([True, True, False]),
        "ema_decay": st.floats(0.1, 0.99),
        "window": st.integers(1, 6) | st.just(20),
        "seed": st.integers(0, 3),
    }
)
NORMS = st.one_of(
    st.floats(1e-30, 1e30),
    st.floats(0.5, 2.0),
    st.sampled_from([0.0, 1.0, 1.0, 3.0, math.inf, -math.inf, math.nan, 1e-300]),
)

PATHS_DO_NOT_MATTER = {"history": "shared", "fold_switches": True}
"""Settings with which the path that a unit is on plays no part in its history."""

STEADY = {
    "alpha": 3.0,
    "beta": 2.0,
    "delta": 2,
    "max_recovered": 2,
    "lock_steps": 3,
    "warmup_steps": 0,
}


def units(count):
    return UnitTable(
        Unit(i // 4, i % 4, f"decoder.layers.{i // 4}.linear_{i % 4}", (8, 8)) for i in range(count)
    )


def make(count, config, **changes):
    return Controller(ControlConfig(**{**config, **changes}), units(count))


def run(controller, norms, updated=None, first=1):
    """Decisions of steps `first`, `first` + 1 and so on."""
    updated = [True] * len(norms) if updated is None else updated
    return [
        controller.decide(np.array(row), step=step, updated=flag)
        for step, (row, flag) in enumerate(zip(norms, updated, strict=True), start=first)
    ]


def bits(decision):
    """Everything in a decision, as something that can be compared bit for bit."""
    return {
        name: value.tobytes() if isinstance(value, np.ndarray) else value
        for name, value in vars(decision).items()
    }


def steady(count=4, **changes):
    """A controller after ten steps of norm 1."""
    controller = make(count, STEADY, **changes)
    run(controller, [[1.0] * count] * 10)
    return controller


@st.composite
def drawn_traces(draw):
    """Norms one by one, which shrink well; few, as drawing takes long."""
    count = draw(st.integers(1, 4))
    row = st.lists(NORMS, min_size=count, max_size=count)
    norms = draw(st.lists(row, min_size=1, max_size=12))
    updated = draw(st.lists(st.booleans(), min_size=len(norms), max_size=len(norms)))
    return count, norms, updated


@st.composite
def seeded_traces(draw):
    """Long traces from a seed: ordinary, equal or extreme norms, some replaced by odd ones, some steps skipped."""
    count, steps = draw(st.integers(1, 12)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = (steps, count)
    norms = {
        "ordinary": lambda: rng.lognormal(sigma=0.7, size=size),
        "equal": lambda: rng.integers(0, 4, size=size).astype(float),
        "extreme": lambda: 10.0 ** rng.uniform(-30, 30, size=size),
    }[draw(st.sampled_from(["ordinary", "equal", "extreme"]))]()
    odd = rng.random(size) < draw(st.sampled_from([0.0, 0.02, 0.3]))
    norms = np.where(odd, rng.choice([0.0, math.nan, math.inf, 1e-30, 1e30], size=size), norms)
    updated = rng.random(steps) >= draw(st.sampled_from([0.0, 0.1, 0.5]))
    return count, norms.tolist(), updated.tolist()


TRACES = drawn_traces() | seeded_traces()
