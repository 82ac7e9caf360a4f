"""The paper: risk statistics, budgeted selection, locks and policies, in NumPy.

In: one gradient norm per unit and step. Out: a Decision with the recovery set of the next step.
Never: torch, processes, devices, or knowledge of what a recovery path is.
"""
