"""One trainer: configuration, set-up, the step, the loop, checkpoints.

In: a RunConfig. Out: a run folder. Never: a second way to do any of it.
"""
