"""GNMR control in other trainers: one host, one file, one `attach`.

In: a host's model, optimizer and steps. Out: decisions, and a run folder that the analysis verbs read. Never trains.
"""
