"""A run on a terminal, redrawn in place: for the process that trains, and for `gnmr-megatron watch`.

In: events and the last record of the risk matrix. Out: a few rows at the bottom of the terminal. Never: a wait of
training for the terminal.
"""
