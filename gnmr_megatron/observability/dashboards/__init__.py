"""W&B and TensorBoard.

In: events, and the run folder that they are about. Out: what the services show. Never: training that waits for one.
"""
