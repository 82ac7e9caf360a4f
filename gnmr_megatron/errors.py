"""The errors a user can meet.

    GnmrError
     ├─ ConfigError        a configuration key, value or combination
     │   └─ LayoutError    a parallel layout that cannot be built
     ├─ DataError          a corpus, tokenizer or dataset
     ├─ CheckpointError    a checkpoint that cannot be written or read
     ├─ ConsensusError     ranks that disagree on a decision
     ├─ DivergenceError    training stopped because losses or gradients were not finite
     └─ EngineError        megatron-core or torch lacks something that is needed

Each message says what was wrong, where (file, key, rank, unit) and what to do.
"""


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


class DivergenceError(GnmrError):
    """Losses or gradients were not finite for too many steps in a row."""


class EngineError(GnmrError):
    """The installed torch or megatron-core cannot do what is asked."""
