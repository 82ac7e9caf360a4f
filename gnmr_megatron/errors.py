"""The errors a user can meet.

    GnmrError
     ├─ ConfigError        a configuration key, value or combination
     │   └─ LayoutError    a parallel layout that cannot be built
     ├─ DataError          a corpus, tokenizer or dataset
     ├─ CheckpointError    a checkpoint that cannot be written or read
     ├─ ConsensusError     ranks that disagree on a decision
     ├─ ClusterError       ranks or nodes that are lost
     ├─ DivergenceError    training stopped because losses or gradients were not finite
     └─ EngineError        megatron-core or torch lacks something that is needed

Each message says what was wrong, where (file, key, rank, unit) and what to do.
"""

import difflib
from collections.abc import Sequence


class GnmrError(Exception):
    """Root of all errors raised on purpose; the command line prints its message without a traceback."""


class ConfigError(GnmrError):
    """A configuration key, value or combination of values is wrong."""


class LayoutError(ConfigError):
    """The parallel layout does not fit the model, the batch or the number of processes."""


class DataError(GnmrError):
    """A corpus, tokenizer or dataset is missing, broken or does not fit the others."""


class CheckpointError(GnmrError):
    """A checkpoint cannot be written, is incomplete or belongs to another run."""


class ConsensusError(GnmrError):
    """Ranks hold different unit tables or took different decisions."""


class ClusterError(GnmrError):
    """Ranks gave up their lives or cannot be reached."""


class DivergenceError(GnmrError):
    """Losses or gradients were not finite for too many steps in a row."""


class EngineError(GnmrError):
    """The installed torch or megatron-core cannot do what is asked."""


def did_you_mean(value: str, possible: Sequence[str], *, list_all: bool = False) -> str:
    """End of a message about an unknown name: the nearest one; all that there are if none is near, or if asked for."""
    close = difflib.get_close_matches(value, possible, n=1, cutoff=0.5)
    hint = f"; did you mean `{close[0]}`?" if close else ";"
    return f"{hint} possible: {', '.join(possible)}" if list_all or not close else hint
