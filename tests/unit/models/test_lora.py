"""Adapters of one process: what they keep for backward, and what dropout does; layouts are in tests/distributed."""

from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

from gnmr_megatron.distributed import engine_compat
from gnmr_megatron.distributed.layout import ParallelLayout
from gnmr_megatron.distributed.process_groups import start_process_groups, stop_process_groups
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.frozen_weights import frozen_path
from gnmr_megatron.models.llama import DTYPES, build_chunks, transformer_config
from gnmr_megatron.models.lora import add_adapters
from gnmr_megatron.models.lora_config import LoraConfig
from gnmr_megatron.models.precision_plan import plan_units
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.registry import precision_path

RANK, TOKENS = 4, 12
SETTINGS = PrecisionConfig(group_size=16)


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    start_process_groups(ParallelLayout(), seed=1, timeout=timedelta(seconds=30))
    yield
    stop_process_groups()


def adapted(dtype="fp32", **lora):
    """Plans and linears of a model with adapters on its first layer's projections."""
    config = LlamaConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, dtype=dtype,
        vocab_padding_multiple=64,
    )  # fmt: skip
    engine = transformer_config(
        config, {**ParallelLayout().engine_fields(), **engine_compat.device_fields("cpu")}
    )
    chunks = build_chunks(
        config, engine, vocab_size=50, sequence_length=TOKENS, seed=1, device=torch.device("cpu")
    )
    settings = LoraConfig(rank=RANK, units=["decoder.layers.0.*"], **lora)
    plans = plan_units(config, SETTINGS, settings)
    linears = local_linears(chunks, {plan.unit.id for plan in plans})
    for chunk in chunks:
        chunk.to(DTYPES[dtype])
    add_adapters(chunks, linears, settings, seed=1)
    return plans, linears


def measured(linear, x):
    """Bytes that a forward keeps, parameters aside."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        linear(x)
    for parameter in linear.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("path", ["fp32", "bf16", "saved_int8", "saved_int4", "frozen_int8"])
def test_what_a_unit_keeps_for_its_adapter_is_what_the_plan_says(path, dtype):
    plans, linears = adapted(dtype)
    for plan in plans:
        linear = linears[plan.unit.id]
        is_frozen = path == "frozen_int8"
        linear.path = frozen_path(path, linear) if is_frozen else precision_path(path, SETTINGS)
        x = torch.randn(TOKENS, 1, linear.weight.shape[1], dtype=DTYPES[dtype], requires_grad=True)
        table = plan.kept_bytes(path, SETTINGS, tensor_parallel=1, sequence_parallel=False)
        assert measured(linear, x) == TOKENS * table
        assert (table == 0) == plan.is_fixed  # the second layer has no adapters


def test_dropout_acts_on_the_input_of_a_in_training_and_on_nothing_else():
    _, linears = adapted(dropout=0.25)
    linear = linears["decoder.layers.0.mlp.linear_fc2"]
    x = torch.ones(TOKENS, 50, linear.weight.shape[1])
    torch.nn.init.normal_(linear.lora.b)
    with torch.no_grad():
        adapter = linear.lora
        linear.eval()
        whole, again = (linear(x)[0] - x @ linear.weight.t() for _ in range(2))
        linear.train()
        dropped, other = (linear(x)[0] - x @ linear.weight.t() for _ in range(2))
        assert torch.equal(whole, again)
        assert not torch.equal(dropped, other)  # a new draw each time
        expected = F.linear(F.linear(x, adapter.a), adapter.b) * adapter.scale
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
        # 600 tokens draw for themselves and agree on the mean with what nothing was dropped from
        deviation = dropped.std(dim=(0, 1)) / 600**0.5
        assert ((dropped.mean(dim=(0, 1)) - whole[0, 0]).abs() < 5 * deviation).all()
