"""Linears of plain torch that run on a precision path."""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr_megatron.errors import EngineError
from gnmr_megatron.precision.linear import linear
from gnmr_megatron.precision.paths import ExactPath, PrecisionPath
from gnmr_megatron.precision.quantizer import Quantizer


class PathLinear(torch.nn.Linear):
    """`torch.nn.Linear` on a precision path that can change between steps; made by `add_paths`.

    Attributes:
        path: precision path of the current step.
        quantizer: its rounding noise and counts.
    """

    path: PrecisionPath
    quantizer: Quantizer

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]; within autocast in its type, as torch's own linear.

        Raises:
            EngineError: the weight is a DTensor, as under tensor parallelism.
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if hasattr(weight, "placements"):
            raise EngineError(
                f"precision paths multiply plain tensors, and a weight {tuple(weight.shape)} is a DTensor in the "
                "forward pass, as under tensor parallelism; attach without precision, in mode monitor"
            )
        device = input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            output = linear(input, weight, self.path, quantizer=self.quantizer)
            return output if bias is None else output + bias

    def extra_repr(self) -> str:
        """Sizes, and the path."""
        return f"{super().extra_repr()}, path={self.path.name}"


def add_paths(module: torch.nn.Linear) -> PathLinear:
    """Turn a linear into one on a path, exact at first, in place: parameters, hooks and names stay.

    Also for one that FSDP2 has wrapped, or will wrap.
    """
    kind = type(module)
    module.__class__ = (
        PathLinear
        if kind is torch.nn.Linear
        else type(f"Path{kind.__name__}", (PathLinear, kind), {})
    )
    assert isinstance(module, PathLinear)
    module.path, module.quantizer = ExactPath("exact"), Quantizer()
    return module
