import math

import pytest

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 0.0),
        ("alpha", -1.0),
        ("alpha", math.nan),
        ("alpha", math.inf),
        ("alpha", {}),
        ("alpha", {-1: 2.0}),
        ("alpha", {0: 2.0, 5: math.inf}),
        ("beta", 0.0),
        ("beta", math.inf),
        ("beta", {0: 2.0, 10: -1.0}),
        ("beta", {0: math.nan}),
        ("delta", 0),
        ("max_recovered", -1),
        ("max_recovered", math.inf),
        ("max_recovered", {}),
        ("max_recovered", {0: 3, 5: -2}),
        ("lock_steps", -1),
        ("warmup_steps", -1),
        ("ema_decay", 0.0),
        ("ema_decay", 1.0),
        ("ema_decay", math.nan),
        ("window", 0),
        ("collapse_ratio", 0.0),
        ("collapse_ratio", 1.0),
        ("collapse_ratio", math.nan),
        ("edge_layers", 0),
        ("seed", -1),
        ("check_interval", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(field, value):
    with pytest.raises(ConfigError, match=rf"^gnmr\.{field}: ") as refused:
        ControlConfig(**{field: value})
    assert str(value) in str(refused.value)


def test_replay_needs_a_trace():
    with pytest.raises(ConfigError, match=r"gnmr\.policy: replay needs gnmr\.trace"):
        ControlConfig(policy="replay")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_recovered": 0, "lock_steps": 0, "warmup_steps": 0, "check_interval": 0},
        {"delta": 1, "window": 1, "edge_layers": 1, "seed": 0},
        {"alpha": {0: 1e-3, 100: 5.0}, "max_recovered": {0: 0, 9: 4}, "collapse_ratio": 0.5},
        {"policy": "replay", "trace": "runs/earlier"},
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(settings):
    config = ControlConfig(**settings)
    assert all(getattr(config, key) == value for key, value in settings.items())
