"""Which rank holds what, and how all ranks come to know the same numbers.

In: model chunks on many ranks. Out: the same unit norms everywhere, from one all-reduce.
Never: a model's architecture, or what the norms are used for.
"""
