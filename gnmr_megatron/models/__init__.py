"""LLaMA out of megatron-core, with linears that hold two precision paths.

In: a model configuration and a recovery set. Out: model chunks whose units switch paths.
Never: a decision about which unit to switch.
"""
