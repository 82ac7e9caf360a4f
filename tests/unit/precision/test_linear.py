import pytest
import torch
import torch.nn.functional as F

from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.linear import linear
from gnmr_megatron.precision.quantization import pack, unpack
from gnmr_megatron.precision.registry import precision_path

CONFIG = PrecisionConfig(group_size=128)
SAVED = ["saved_int8", "saved_int4", "saved_int3", "saved_int2"]


def operands(dtype, width=256, out=96):
    torch.manual_seed(0)
    x = torch.randn(16, 2, width).to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(out, width)).to(dtype).requires_grad_()
    return x, weight, torch.randn(16, 2, out).to(dtype)


def run(function, x, weight, grad_output):
    output = function(x, weight)
    return output, *torch.autograd.grad(output, [x, weight], grad_output)


def exact(x, weight):
    return torch.matmul(x, weight.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAVED)
def test_forward_and_input_gradient_are_the_exact_ones_to_the_bit(name, dtype):
    x, weight, grad_output = operands(dtype)
    path = precision_path(name, CONFIG)
    output, grad_input, _ = run(lambda a, b: linear(a, b, path), x, weight, grad_output)
    expected, expected_grad, _ = run(exact, x, weight, grad_output)
    assert torch.equal(output, expected)
    assert torch.equal(grad_input, expected_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAVED)
def test_weight_gradient_is_that_of_the_dequantised_input_exactly(name, dtype):
    x, weight, grad_output = operands(dtype)
    path = precision_path(name, CONFIG)
    *_, grad_weight = run(lambda a, b: linear(a, b, path), x, weight, grad_output)
    seen = unpack(pack(x.detach().reshape(-1, 256), path.saved), dtype)
    expected = grad_output.reshape(-1, 96).t() @ seen
    assert torch.equal(grad_weight, expected)
    assert not torch.equal(
        grad_weight, grad_output.reshape(-1, 96).t() @ x.detach().reshape(-1, 256)
    )


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_an_exact_path_equals_the_plain_linear_to_the_bit(name, dtype):
    x, weight, grad_output = operands(dtype)
    path = precision_path(name, CONFIG)
    for ours, expected in zip(
        run(lambda a, b: linear(a, b, path), x, weight, grad_output),
        run(F.linear, x, weight, grad_output),
        strict=True,
    ):
        assert torch.equal(ours, expected)


def test_the_bf16_path_of_an_fp32_model_computes_in_bf16_and_returns_fp32():
    x, weight, grad_output = operands(torch.float32)
    path = precision_path("bf16", CONFIG)
    output, grad_input, grad_weight = run(lambda a, b: linear(a, b, path), x, weight, grad_output)
    low = [t.detach().bfloat16().requires_grad_() for t in (x, weight)]
    expected = run(F.linear, *low, grad_output.bfloat16())
    for ours, theirs in zip((output, grad_input, grad_weight), expected, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize(
    ("name", "share"), [("bf16", 1.0), ("saved_int8", 0.52), ("saved_int4", 0.27)]
)
def test_what_is_kept_for_backward_stays_within_its_share_of_bf16(name, share):
    x, weight, _ = operands(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, weight, precision_path(name, CONFIG))
    activations = [t for t in kept if t.data_ptr() != weight.data_ptr()]
    assert 0 < sum(t.nbytes for t in activations) <= share * x.nbytes
    assert len(kept) > len(activations)  # the weight was seen and left out


def test_a_frozen_weight_keeps_no_activation():
    x, weight, _ = operands(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = linear(x, weight.detach(), precision_path("saved_int4", CONFIG))
    assert [t.shape for t in kept] == [weight.shape]
    (grad_input,) = torch.autograd.grad(output, [x], torch.ones_like(output))
    assert torch.equal(grad_input, torch.ones_like(output) @ weight.detach())


class TwoHalves:
    """An exchange whose other rank holds the same rows and gradients."""

    def gather(self, shard):
        return lambda: torch.cat([shard, shard])

    def reduce(self, grad_input):
        return lambda: grad_input[: len(grad_input) // 2] * 2

    def own_rows(self, whole):
        return whole[: len(whole) // 2].clone()


@pytest.mark.parametrize("name", ["fp32", *SAVED])
def test_rows_gathered_from_other_ranks_enter_output_and_weight_gradient(name):
    x, weight, grad_output = operands(torch.float32)
    path = precision_path(name, CONFIG)
    both = torch.cat([grad_output, grad_output])
    shard = run(lambda a, b: linear(a, b, path, exchange=TwoHalves()), x, weight, both)
    whole_x = torch.cat([x, x]).detach().requires_grad_()
    output, grad_input, grad_weight = run(lambda a, b: linear(a, b, path), whole_x, weight, both)
    assert torch.equal(shard[0], output)
    assert torch.equal(shard[1], grad_input[:16] * 2)
    assert torch.equal(shard[2], grad_weight)
