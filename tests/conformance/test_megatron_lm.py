"""Control attached to Megatron-LM's Transformer Engine layers: a decision sets what their next forward reads."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.integrations.megatron_lm import attach
from gnmr_megatron.models import te_adapter
from gnmr_megatron.models.discovery import local_linears
from gnmr_megatron.models.llama import build_chunks
from gnmr_megatron.models.precision_plan import plan_units
from gnmr_megatron.precision.config import PrecisionConfig
from tests.conformance.test_transformer_engine import MODEL, engine_of

PATHS = PrecisionConfig(low="te_fp8_tensorwise", recovery="te_bf16")
GNMR = ControlConfig(warmup_steps=0, delta=1, max_recovered=1, lock_steps=0)
SHOCKED = "decoder.layers.5.mlp.linear_fc2"


@pytest.fixture
def built(monkeypatch):
    """Chunks and optimizer as Megatron-LM makes them with Transformer Engine and `--fp8-format hybrid`."""
    monkeypatch.setattr(te_adapter, "version", lambda _name: te_adapter.TESTED[0])
    plans = plan_units(MODEL, PATHS)
    engine = engine_of(plans)
    engine.init_model_with_meta_device = False
    chunks = build_chunks(
        MODEL,
        engine,
        vocab_size=128,
        sequence_length=64,
        seed=1,
        device=torch.device("cpu"),
        uses_te=True,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(engine, settings, chunk) for chunk in chunks]
    config = OptimizerConfig(optimizer="sgd", lr=1e-3, bf16=True, params_dtype=torch.bfloat16)
    return engine, wrapped, get_megatron_optimizer(config, wrapped)


def test_the_unit_that_was_shocked_runs_its_next_step_without_fp8(built):
    _, chunks, optimizer = built
    control = attach(chunks, optimizer, GNMR, precision=PATHS)
    linears = local_linears(chunks, set(control.units.ids))
    for shock in (1.0, 30.0):
        for parameter in chunks[0].parameters():
            parameter.main_grad.fill_(1e-3)
        linears[SHOCKED].weight.main_grad *= shock
        optimizer.step()
    assert control.recovered == [SHOCKED]
    recipes = {
        name: linear.te_quant_params.training_recipe.fp8_quantization_recipe
        for name, linear in linears.items()
    }
    assert {name for name, recipe in recipes.items() if recipe is None} == {SHOCKED}
    assert len(set(recipes.values())) == 2


def test_an_engine_in_another_mode_than_the_low_path_is_refused(built):
    engine, chunks, optimizer = built
    engine.fp8 = None
    with pytest.raises(ConfigError, match="needs the engine's fp8 to be hybrid, and it is None"):
        attach(chunks, optimizer, GNMR, precision=PATHS)
