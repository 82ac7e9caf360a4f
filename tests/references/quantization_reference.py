"""Saved-activation quantisation in plain NumPy, one group after the other."""

import numpy as np


def to_bfloat16(value: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, as float32."""
    bits = np.asarray(value, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def round_trip(x: np.ndarray, *, largest: int, granularity: str, group_size: int) -> np.ndarray:
    """What `x` [tokens, width] is worth after quantising to integers in [-largest, largest] and back."""
    out = np.zeros_like(x, dtype=np.float32)
    tokens, width = x.shape
    if granularity == "tensor":
        blocks = [(slice(0, tokens), slice(0, width))]
    elif granularity == "token":
        blocks = [(slice(t, t + 1), slice(0, width)) for t in range(tokens)]
    else:
        blocks = [
            (slice(t, t + 1), slice(c, c + group_size))
            for t in range(tokens)
            for c in range(0, width, group_size)
        ]
    for where in blocks:
        values = x[where].astype(np.float32)
        scale = to_bfloat16(np.float32(np.abs(values).max()) / np.float32(largest)).reshape(())
        if scale == 0:
            continue
        codes = np.clip(np.rint(values / scale), -largest, largest)
        out[where] = codes.astype(np.float32) * scale
    return out
