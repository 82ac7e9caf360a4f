import pytest

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.control.schedules import value_at
from gnmr_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 0.0),
        ("alpha", {}),
        ("beta", {0: 2.0, 10: -1.0}),
        ("delta", 0),
        ("max_recovered", -1),
        ("max_recovered", {0: 3, 5: -2}),
        ("lock_steps", -1),
        ("warmup_steps", -1),
        ("ema_decay", 1.0),
        ("window", 0),
        ("collapse_ratio", 1.0),
        ("edge_layers", 0),
        ("check_interval", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(field, value):
    with pytest.raises(ConfigError, match=rf"^gnmr\.{field}: "):
        ControlConfig(**{field: value})


def test_replay_needs_a_trace():
    with pytest.raises(ConfigError, match=r"gnmr\.policy: replay needs gnmr\.trace"):
        ControlConfig(policy="replay")


@pytest.mark.parametrize(
    ("step", "value"), [(0, 4.0), (10, 4.0), (15, 3.0), (20, 2.0), (25, 2.5), (30, 3.0), (99, 3.0)]
)
def test_a_schedule_is_linear_between_its_steps_and_constant_outside(step, value):
    assert value_at({30: 3.0, 10: 4.0, 20: 2.0}, step) == value


def test_a_constant_is_its_own_schedule():
    assert value_at(3, 1000) == 3.0
