"""Instruction data: conversations and completions, the loss on what the model is to write, many to a sequence.

In: JSON lines. Out: packed sequences with masks. Never: a model.
"""
