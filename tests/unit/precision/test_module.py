"""A linear of plain torch on a path: exact where the path is, and as torch's own in every other way."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from gnmr_megatron.errors import EngineError
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.module import PathLinear, add_paths
from gnmr_megatron.precision.registry import precision_path

SETTINGS = PrecisionConfig(group_size=16)


def twins(*, bias=True):
    """torch's own linear, and the same on a path."""
    torch.manual_seed(0)
    own = torch.nn.Linear(64, 32, bias=bias)
    return own, add_paths(copy.deepcopy(own))


def run(module, x):
    x = x.clone().requires_grad_()
    output = module(x)
    output.float().square().sum().backward()
    return output.detach(), x.grad, module.weight.grad


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_on_an_exact_path_are_those_of_torch(bias):
    own, ours = twins(bias=bias)
    x = torch.randn(3, 5, 64)
    for expected, found in zip(run(own, x), run(ours, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if bias:
        torch.testing.assert_close(ours.bias.grad, own.bias.grad)


def test_autocast_casts_as_it_does_for_torch():
    own, ours = twins()
    x = torch.randn(7, 64)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = own(x), ours(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    found.float().sum().backward()
    assert ours.weight.grad.dtype == torch.float32


def test_a_low_path_keeps_the_bytes_that_it_promises():
    _, ours = twins()
    kept = {}
    for name in ("fp32", "saved_int8", "saved_int4"):
        ours.path = precision_path(name, SETTINGS)
        sizes = []
        weight = ours.weight.data_ptr()

        def count(tensor, sizes=sizes, weight=weight):
            if tensor.data_ptr() != weight:
                sizes.append(tensor.nbytes)
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            ours(torch.randn(100, 64))
        kept[name] = sum(sizes)
    scales = 100 * 64 // 16 * 2
    assert kept == {
        "fp32": 100 * 64 * 4,
        "saved_int8": 100 * 64 + scales,
        "saved_int4": 100 * 32 + scales,
    }


def test_parameters_names_and_kind_stay_and_a_copy_is_independent():
    own = torch.nn.Linear(8, 4)
    weight = own.weight
    ours = add_paths(own)
    assert ours is own
    assert ours.weight is weight
    assert isinstance(ours, torch.nn.Linear)
    assert list(dict(ours.named_parameters())) == ["weight", "bias"]
    other = copy.deepcopy(ours)
    other.weight.data.zero_()
    other.bias.data.zero_()
    assert other(torch.ones(1, 8)).abs().sum() == 0
    assert ours(torch.ones(1, 8)).abs().sum() > 0
    assert "path=exact" in repr(ours)


def test_a_subclass_of_linear_keeps_what_it_adds():
    class Named(torch.nn.Linear):
        def name(self):
            return "named"

    ours = add_paths(Named(8, 4))
    assert isinstance(ours, PathLinear)
    assert ours.name() == "named"


def test_a_sharded_weight_in_the_forward_is_refused():
    _, ours = twins()
    ours.weight.placements = ()
    with pytest.raises(EngineError, match="as under tensor parallelism; attach without precision"):
        ours(torch.randn(2, 64))
