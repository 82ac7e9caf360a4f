"""A check-up before a run is paid for: of this machine, of what a run needs, of the nodes among each other.

In: settings of a run, or none; the processes that torchrun started, or this one. Out: findings, each with what to do.
Never: a change to the machine, a collective of the training's, a traceback because a package is broken.
"""
