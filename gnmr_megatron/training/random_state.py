"""State of the random generators that a step draws from: dropout of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel


def random_state() -> dict[str, Any]:
    """States of torch's generators and of the engine's tracker, on this rank."""
    state = {
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Take back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
