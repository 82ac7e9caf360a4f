"""GNMR control in other trainers: one host, one file, one `attach`.

In: a host's model, its gradients once a step, and the settings of control and precision. Out: decisions, units on the
path that was decided, and, where asked for, a run folder that the verbs read. Never: trains, steps an optimizer or
changes a gradient; a host with control on exact paths trains as without.
"""
