"""Architecture of a LLaMA; no torch, so that a configuration is checked before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnmr_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    Raises:
        ConfigError: sizes that do not fit each other; the message names the key.
    """

    num_layers: int = 4
    """Transformer layers."""

    hidden_size: int = 256
    """Width of the residual stream."""

    ffn_hidden_size: int = 768
    """Width of the SwiGLU hidden layer."""

    num_attention_heads: int = 8
    """Query heads."""

    num_query_groups: int | None = None
    """Key/value heads of grouped-query attention; null for one to each query head."""

    rotary_base: int = 10_000
    """Base of the rotary frequencies."""

    rope_scaling: Literal["none", "linear", "dynamic", "llama3"] = "none"
    """How rotary frequencies are scaled for longer sequences, as in Hugging Face's `rope_type`. `dynamic` takes the
    frequencies that belong to data.sequence_length."""

    rope_scaling_factor: float = 1.0
    """How many times longer the sequences are; only with rope_scaling."""

    rope_original_positions: int = 8192
    """Longest sequence of the unscaled frequencies; for `dynamic` and `llama3`."""

    rope_low_freq_factor: float = 1.0
    """Wavelengths above rope_original_positions divided by this are scaled in full; for `llama3`."""

    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_positions divided by this are not scaled; for `llama3`."""

    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""

    tie_embeddings: bool = False
    """Share the weights of embedding and output layer."""

    init_std: float = 0.02
    """Deviation of initial weights; output projections are divided by sqrt(2 * num_layers)."""

    vocab_padding_multiple: int = 128
    """The vocabulary is padded to a multiple of this; padded logits are masked out."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of weights and activations; gradients are always accumulated in FP32."""

    def __post_init__(self) -> None:
        for key in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "vocab_padding_multiple",
        ):
            if getattr(self, key) < 1:
                raise ConfigError(f"model.{key}: {getattr(self, key)} must be at least 1")
        heads, groups = self.num_attention_heads, self.query_groups
        if self.hidden_size % heads or (self.hidden_size // heads) % 2:
            raise ConfigError(
                f"model.hidden_size: {self.hidden_size} must be an even multiple of model.num_attention_heads"
                f" ({heads}), because rotary positions turn pairs of each head's values"
            )
        if groups < 1 or heads % groups:
            raise ConfigError(
                f"model.num_query_groups: {groups} must divide model.num_attention_heads ({heads})"
            )
        if self.init_std <= 0 or self.norm_epsilon <= 0:
            raise ConfigError("model.init_std and model.norm_epsilon must be positive")
        self._check_rope()

    def _check_rope(self) -> None:
        if self.rope_scaling == "none":
            if self.rope_scaling_factor != 1:
                raise ConfigError(
                    f"model.rope_scaling_factor: {self.rope_scaling_factor} has no effect without "
                    "model.rope_scaling; set that to linear, dynamic or llama3"
                )
        elif self.rope_scaling_factor < 1:
            raise ConfigError(
                f"model.rope_scaling_factor: {self.rope_scaling_factor} must be at least 1"
            )
        if self.rotary_base < 1 or self.rope_original_positions < 1:
            raise ConfigError(
                "model.rotary_base and model.rope_original_positions must be at least 1"
            )
        if not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor:
            raise ConfigError(
                f"model.rope_low_freq_factor: {self.rope_low_freq_factor} must be positive and below "
                f"model.rope_high_freq_factor ({self.rope_high_freq_factor})"
            )

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Vocabulary size rounded up to the padding multiple; the same in every layout."""
        return -(-vocab_size // self.vocab_padding_multiple) * self.vocab_padding_multiple

    def num_parameters(self, vocab_size: int) -> int:
        """Parameters of the whole model with a vocabulary of that size, padding included."""
        width, attention = self.hidden_size, self.head_size * self.num_attention_heads
        key_value = self.head_size * self.query_groups
        layer = (
            width * (2 * attention + 2 * key_value) + 3 * width * self.ffn_hidden_size + 2 * width
        )
        embeddings = (1 if self.tie_embeddings else 2) * self.padded_vocab_size(vocab_size) * width
        return self.num_layers * layer + embeddings + width
