"""The switches of a model's linears, for Transformer Engine's modules or for our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gnmr_megatron.models import te_adapter
from gnmr_megatron.models.precision_plan import UnitPlan, uses_te
from gnmr_megatron.models.switchboard import PathSwitch, linear_switches
from gnmr_megatron.precision.catalog import PATHS
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.precision.fusion import use_fused_kernels
from gnmr_megatron.precision.registry import precision_path


def path_switches(
    precision: PrecisionConfig,
    plans: Sequence[UnitPlan],
    linears: Mapping[str, torch.nn.Module],
    device: torch.device,
) -> Mapping[str, PathSwitch]:
    """Switches of this rank's linears by global name."""
    if uses_te(plans):
        return te_adapter.te_switches(plans, linears)
    fuse = device.type != "cpu" if precision.fuse is None else precision.fuse
    use_fused_kernels(enabled=fuse, device=device)
    paths = {
        name: precision_path(name, precision)
        for plan in plans
        for name in plan.paths
        if PATHS[name].family != "frozen"  # each linear has its own, of its frozen weight
    }
    return linear_switches(plans, linears, paths)
