"""One all-reduce that gives every rank the gradient norm of every unit and of the model.

It takes the place of megatron-core's own norm reduction, so control adds no collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from gnmr_megatron.control.controller import Decision
from gnmr_megatron.control.statistics import FloatArray
from gnmr_megatron.control.units import UnitTable
from gnmr_megatron.distributed.engine_compat import tensor_norms
from gnmr_megatron.distributed.ownership import OwnedGradient, owned_by_unit
from gnmr_megatron.errors import ConsensusError
from gnmr_megatron.models.input_exchange import all_gather_single


@dataclass(frozen=True)
class UnitNorms:
    """Gradient norms of a step, unscaled, before clipping, equal on every rank.

    Attributes:
        per_unit: [units] float64.
        global_norm: norm over all parameters of the model.
    """

    per_unit: FloatArray
    global_norm: float


class MeasuresNorms(Protocol):
    """What the training step asks for norms."""

    def unit_norms(self) -> UnitNorms:
        """Norms of the gradients that are ready now."""

    def is_finite_here(self) -> bool:
        """Whether the gradients that this rank speaks for are finite; for steps that went wrong."""


class RiskConsensus:
    """The risk vector: one float64 sum of squares per unit, and one for the rest of the model.

    Important:
        Call `unit_norms` after `optimizer.prepare_grads()`, when gradients are reduced, and before clipping.

    Args:
        owned: the pieces of gradient that this rank speaks for.
        num_units: units of the whole model; the vector has one slot more.
        device: device of the gradients.
    """

    def __init__(
        self, owned: Sequence[OwnedGradient], num_units: int, device: torch.device
    ) -> None:
        self._gradients = [piece.gradient for piece in owned]
        self._slots = torch.tensor([piece.slot for piece in owned], dtype=torch.int64).to(device)
        self._vector = torch.zeros(num_units + 1, dtype=torch.float64, device=device)

    def unit_norms(self) -> UnitNorms:
        """One kernel, one all-reduce of 8 * (units + 1) bytes, one copy to the host."""
        self._vector.zero_()
        if self._gradients:
            norms = tensor_norms(self._gradients)
            self._vector.index_add_(0, self._slots, norms.double().square())
        dist.all_reduce(self._vector)
        squares = self._vector.cpu().numpy()
        return UnitNorms(np.sqrt(squares[:-1]), float(np.sqrt(squares.sum())))

    def is_finite_here(self) -> bool:
        """See `MeasuresNorms`."""
        return not self._gradients or bool(tensor_norms(self._gradients).isfinite().all())


def risk_consensus(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    units: UnitTable,
    linears: Mapping[str, torch.nn.Module],
    device: torch.device,
) -> RiskConsensus:
    """The consensus over the gradients of a model that megatron-core built.

    Args:
        chunks: DDP-wrapped model chunks of this rank.
        optimizer: megatron-core optimizer of the chunks.
        units: of the whole model.
        linears: projections of this rank by global name; those that are no units count as rest.
        device: device of the gradients.
    """
    owned = owned_by_unit(chunks, optimizer, units, linears)
    return RiskConsensus(owned, len(units), device)


class EngineNorm:
    """megatron-core's own norm and reduction, for training without control; knows no units."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def unit_norms(self) -> UnitNorms:
        """The global norm alone."""
        return UnitNorms(np.zeros(0), float(self._optimizer.get_grad_norm()))

    def is_finite_here(self) -> bool:
        """Not known: the engine tells the norm of all ranks."""
        return True


def verify_decision(decision: Decision) -> None:
    """Check that all ranks took the same decision: one all-gather of 8 bytes a rank.

    Raises:
        ConsensusError: on every rank, naming the ranks that differ from the majority.
    """
    own = torch.frombuffer(bytearray(decision.fingerprint), dtype=torch.int64)
    if dist.get_backend() == "nccl":
        own = own.cuda()
    everyone = torch.empty(dist.get_world_size(), dtype=torch.int64, device=own.device)
    all_gather_single(everyone, own)
    fingerprints = everyone.tolist()
    common = Counter(fingerprints).most_common(1)[0][0]
    different = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != common]
    if different:
        raise ConsensusError(
            f"step {decision.step}: ranks {different} decided another recovery set than the other "
            f"{len(fingerprints) - len(different)} ranks; check that all nodes run the same version and "
            "configuration, then resume from the last checkpoint"
        )
