"""Stable low-precision LLM pretraining under runtime control.

The names below load when they are first used; none of them needs torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ControlConfig": "gnmr_megatron.control.config",
    "Controller": "gnmr_megatron.control.controller",
    "Decision": "gnmr_megatron.control.controller",
    "DecisionTrace": "gnmr_megatron.control.trace",
    "GnmrError": "gnmr_megatron.errors",
    "RecordedRun": "gnmr_megatron.analysis.recorded_run",
    "RiskMatrix": "gnmr_megatron.observability.risk_matrix",
    "RunSummary": "gnmr_megatron.observability.summary",
    "Unit": "gnmr_megatron.control.units",
    "UnitTable": "gnmr_megatron.control.units",
    "read_events": "gnmr_megatron.observability.events",
    "read_risk_matrix": "gnmr_megatron.observability.risk_matrix",
    "replay": "gnmr_megatron.analysis.replay",
    "summarize": "gnmr_megatron.observability.summary",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)
