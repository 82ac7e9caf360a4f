"""Build the LLaMA chunks of this rank on megatron-core's GPTModel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from gnmr_megatron.errors import ConfigError, did_you_mean
from gnmr_megatron.models import te_adapter
from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.initialization import initialize_weights
from gnmr_megatron.models.layer_modules import RMSNorm
from gnmr_megatron.models.layer_spec import llama_layer_spec
from gnmr_megatron.models.rope import inverse_frequencies

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


_NOT_IN_THIS_MODEL = (
    "context_parallel_size",
    "expert_model_parallel_size",
    "mtp_num_layers",
    "multi_latent_attention",
    "num_moe_experts",
    "qk_layernorm",
    "quant_recipe",
    "softmax_scale",
    "window_size",
)
_OF_TE_MODULES = ("fp8", "fp4", "tp_comm_overlap", "first_last_layers_bf16")  # and what starts so
_CUDA_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")


def engine_option_problems(options: Mapping[str, Any], *, uses_te: bool) -> Iterator[str]:
    """One line for each further field of the engine that its modules here would ignore.

    Args:
        options: fields that the user adds.
        uses_te: whether layers are made of Transformer Engine's modules.
    """
    for name in options:
        where = f"parallel.engine_options: {name}"
        if name in _NOT_IN_THIS_MODEL:
            yield f"{where} has no effect on a LLaMA of these modules; leave it out"
        elif name in _CUDA_GRAPHS:
            yield f"{where}: CUDA graphs replay the kernels of one path and ignore a switch; leave it out"
        elif not uses_te and name.startswith(_OF_TE_MODULES):
            yield f"{where} is for Transformer Engine's modules; leave it out, or take te_* paths"


def transformer_config(
    config: LlamaConfig,
    engine_fields: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """The engine's configuration.

    Args:
        config: architecture.
        engine_fields: further `TransformerConfig` fields: those of the parallel layout and of the device.
        options: fields that the user adds.

    Raises:
        ConfigError: an option is unknown, belongs to another setting, or is refused by the engine.
    """
    fields, options = {**_architecture_fields(config), **engine_fields}, dict(options or {})
    known = [field.name for field in dataclasses.fields(TransformerConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"parallel.engine_options: megatron-core has no `{name}`{did_you_mean(name, known)}"
            )
        if name in fields:
            raise ConfigError(
                f"parallel.engine_options: `{name}` follows from other settings ({fields[name]!r}); leave it out"
            )
    try:
        return TransformerConfig(**fields, **options)
    except (AssertionError, TypeError, ValueError) as error:
        if not options:
            raise
        raise ConfigError(
            f"parallel.engine_options: megatron-core refuses {options}: {' '.join(str(error).split())}"
        ) from error


def _architecture_fields(config: LlamaConfig) -> dict[str, Any]:
    dtype = DTYPES[config.dtype]
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.query_groups,
        "layernorm_epsilon": config.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": config.init_std,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": config.dtype == "bf16",
        "calculate_per_token_loss": True,
    }


def build_chunks(
    config: LlamaConfig,
    engine: TransformerConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    seed: int,
    device: torch.device,
    uses_te: bool = False,
) -> list[GPTModel]:
    """The model chunks of this rank: one, or as many as it has virtual pipeline stages.

    Args:
        config: architecture.
        engine: from `transformer_config`.
        vocab_size: size of the tokenizer's vocabulary; padded here.
        sequence_length: longest sequence.
        seed: seed of the initial weights.
        device: where the weights live.
        uses_te: build layers of Transformer Engine's modules instead of ours.
    """
    spec = te_adapter.layer_spec() if uses_te else llama_layer_spec()
    virtual_stages = engine.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(virtual_stages) if virtual_stages else [None]:
        where = {"ignore_virtual": stage is None, "vp_stage": stage}
        num_layers = get_num_layers_to_build(engine, vp_stage=stage)
        model = GPTModel(
            engine,
            TransformerBlockSubmodules([spec] * num_layers, RMSNorm),
            vocab_size=config.padded_vocab_size(vocab_size),
            max_sequence_length=sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=config.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
            vp_stage=stage,
        )
        if config.rope_scaling != "none":
            rotary = model.rotary_pos_emb
            rotary.inv_freq = inverse_frequencies(config, sequence_length).to(rotary.inv_freq)
        initialize_weights(model, config, seed=seed)
        if model.post_process:
            _mask_padded_logits(model, vocab_size)
        chunks.append(model.to(device))
    return chunks


def _mask_padded_logits(model: GPTModel, vocab_size: int) -> None:
    """Give padded vocabulary entries no probability; without this they would take part in the softmax."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    width = model.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    num_real = min(max(vocab_size - rank * width, 0), width)
    if num_real == width:
        return

    def mask(_module: torch.nn.Module, _inputs: Any, output: tuple[Tensor, Tensor | None]) -> Any:
        logits, bias = output
        is_padding = torch.arange(width, device=logits.device) >= num_real
        return logits.masked_fill(is_padding, torch.finfo(logits.dtype).min), bias

    model.output_layer.register_forward_hook(mask)
