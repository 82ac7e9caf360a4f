"""Benchmarks of a checkpoint through lm-evaluation-harness, which is called the harness here.

In: a checkpoint and names of tasks. Out: the harness's own results. Never: training, or prompts of our own.
"""
