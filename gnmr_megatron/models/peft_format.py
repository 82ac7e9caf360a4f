"""Adapters under the names of Hugging Face's PEFT, which has one for each of q, k, v, gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnmr_megatron.models.config import LlamaConfig
from gnmr_megatron.models.huggingface import PlacedWeight, split
from gnmr_megatron.models.lora_config import LoraConfig

ADAPTER_CONFIG, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"


def unit_of(placed: PlacedWeight) -> str:
    """Id of the unit that a layer's matrix belongs to; for a norm's weight, one that no unit has."""
    return placed.weight.megatron.replace(
        "decoder.layers.", f"decoder.layers.{placed.layer}."
    ).removesuffix(".weight")


def peft_tensors(
    placed: PlacedWeight, a: Tensor, b: Tensor, config: LlamaConfig
) -> dict[str, Tensor]:
    """PEFT's tensors of one unit's adapter: B is split as the weight is, and each part comes with all of A."""
    tensors = {}
    for name, part in split(placed, b, config).items():
        module = "base_model.model." + name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = a.clone()
        tensors[f"{module}.lora_B.weight"] = part
    return tensors


def peft_config(
    tensors: Mapping[str, Tensor], lora: LoraConfig, *, base_model: str | None
) -> dict[str, Any]:
    """Content of adapter_config.json.

    Args:
        tensors: all of the adapter.
        lora: rank and alpha.
        base_model: name or folder of the base as Hugging Face's library knows it.
    """
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,  # of no effect on what the model computes; not part of a checkpoint
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
