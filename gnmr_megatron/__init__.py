"""Stable low-precision LLM pretraining under runtime control."""

__version__ = "0.1.0"
