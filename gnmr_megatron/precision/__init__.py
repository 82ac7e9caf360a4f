"""How one linear computes and what it keeps for backward.

In: an input, a weight and a path. Out: an output, and gradients. Never: processes, layers, decisions.
"""
