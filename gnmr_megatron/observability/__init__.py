"""What happened, told to people: events, console, W&B, the risk matrix.

In: events of the training loop. Out: files, lines and dashboards. Never: torch, or a change to training.
"""
