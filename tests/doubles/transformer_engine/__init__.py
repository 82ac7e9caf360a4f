"""A double of the Python surface of Transformer Engine 2.11 that megatron-core 0.16.1 and we touch; no kernels.

`make te-conformance` runs the same tests against the real package, which keeps this honest.
"""

from transformer_engine import common, pytorch

__version__ = "2.11.0"
is_double = True
__all__ = ["common", "pytorch"]
