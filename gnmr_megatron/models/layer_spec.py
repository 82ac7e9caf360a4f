"""The ModuleSpec of a LLaMA layer: the only change to the engine's layers is which linears they use."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from gnmr_megatron.models.layer_modules import CausalAttention, RMSNorm
from gnmr_megatron.models.recoverable_linear import RecoverableColumnLinear, RecoverableRowLinear


def llama_layer_spec() -> ModuleSpec:
    """One LLaMA layer with recoverable linears."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=RecoverableColumnLinear,
            core_attention=CausalAttention,
            linear_proj=RecoverableRowLinear,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(
            linear_fc1=RecoverableColumnLinear, linear_fc2=RecoverableRowLinear
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # checkpoints then carry the names of Transformer Engine's fused norm and linear
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
