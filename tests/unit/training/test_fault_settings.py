import math

import pytest

from gnmr_megatron.errors import ConfigError
from gnmr_megatron.training.fault_settings import fault_problems, parse_fault


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("kill", r"faults\[0\]: must be a mapping with `kind` and `step`"),
        ({"kind": "bad_batch"}, r"faults\[0\]: must be a mapping with `kind` and `step`"),
        ({"kind": "bad_bach", "step": 1}, r"faults\[0\].kind: no `bad_bach`; did you mean `bad_batch`\?"),
        ({"kind": "kill_rank", "step": 1}, r"faults\[0\]: kill_rank needs `rank`"),
        ({"kind": "bad_batch", "step": 1, "rnak": 2}, r"faults\[0\]: bad_batch has no `rnak`"),
        ({"kind": "bad_batch", "step": "x"}, r"faults\[0\].step: 'x' is no int"),
        ({"kind": "bad_batch", "step": 0}, r"faults\[0\]: `step` and `steps` must be at least 1"),
    ],
)  # fmt: skip
def test_a_malformed_fault_is_refused_with_its_place(item, message):
    with pytest.raises(ConfigError, match=message):
        parse_fault(item, where="faults[0]")


def test_a_fault_lasts_for_its_steps():
    fault = parse_fault({"kind": "full_disk", "step": 5, "steps": 2}, where="")
    assert [step for step in range(10) if fault.happens_in(step)] == [5, 6]
    poison = parse_fault({"kind": "poison_gradient", "step": 1, "unit": "*"}, where="")
    assert math.isnan(poison.value)


def test_units_and_ranks_that_are_not_there_are_named():
    faults = [
        parse_fault({"kind": "scale_gradient", "step": 1, "unit": "*fc3", "factor": 2}, where=""),
        parse_fault({"kind": "kill_rank", "step": 1, "rank": 4}, where=""),
        parse_fault({"kind": "scale_gradient", "step": 1, "unit": "*fc1", "factor": 2}, where=""),
    ]
    faults.append(
        parse_fault({"kind": "stale_scale", "step": 1, "unit": "*fc1", "factor": 2}, where="")
    )
    ids = ["decoder.layers.0.mlp.linear_fc1"]
    assert len(fault_problems(faults, ids, 4, with_scales=ids)) == 2
    problems = fault_problems(faults, ids, 4, with_scales=[])
    assert [problem.partition(";")[0] for problem in problems] == [
        "faults[0].unit: '*fc3' matches no unit",
        "faults[1].rank: 4, but there are 4 ranks",
        "faults[3]: the low path of '*fc1' keeps no scales of ours",
    ]
