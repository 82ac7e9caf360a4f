"""How exceedances lie in time: when they have settled, and in what clusters they come.

Arrays are [steps, units] bool: whether a unit-step is an exceedance.
"""

from __future__ import annotations

import math

import numpy as np

from gnmr_megatron.control.statistics import BoolArray

LOCKS = (1, 2, 3, 5, 8, 13, 20, 30)
SHORTEST_BLOCK, BLOCKS = 5, 24
RARE = 0.02
SIGNIFICANT = 10.0


def settled_after(risky: BoolArray, rate: float) -> int:
    """Steps at the beginning with clearly more exceedances than `rate`; at most half of all, often 0.

    Blocks of steps are hot if a Poisson number of that rate would reach theirs in 2 % of blocks at most. The beginning
    is where one change of the share of hot blocks is likeliest, if it is significant: a late burst is one hot block.
    """
    steps, units = risky.shape
    length = max(SHORTEST_BLOCK, min(math.ceil(1 / (rate * units)), steps // BLOCKS))
    blocks = steps // length
    counts = risky[: blocks * length].reshape(blocks, -1).sum(axis=1)
    hot: BoolArray = counts >= _rare_count(rate * units * length)
    return int(_change(hot) * length)


def _rare_count(mean: float) -> int:
    """The smallest count that a Poisson variable reaches with a probability of `RARE` at most."""
    probability, below, count = math.exp(-mean), 0.0, 0
    while 1 - below > RARE:
        below += probability
        count += 1
        probability *= mean / count
    return count


def _change(hot: BoolArray) -> int:
    """How many blocks at the beginning are another time, by likelihood; 0 where they are not hotter than the rest."""
    best, found = SIGNIFICANT, 0
    whole = _log_likelihood(hot)
    for end in range(1, len(hot) // 2 + 1):
        before, after = hot[:end], hot[end:]
        gain = 2 * (_log_likelihood(before) + _log_likelihood(after) - whole)
        if before.mean() > after.mean() and gain > best:
            best, found = gain, end
    return found


def _log_likelihood(hot: BoolArray) -> float:
    count, total = int(np.count_nonzero(hot)), len(hot)
    return sum(part * math.log(part / total) for part in (count, total - count) if part)


def covering_lock(risky: BoolArray) -> int:
    """The smallest lock that bridges 90 % of the returns that any bridges, beyond those of chance; else the smallest.

    A lock of L keeps a unit among the candidates up to a return L + 1 steps later.
    """
    units, steps = np.nonzero(risky.T)
    gaps = np.diff(steps)[np.diff(units) == 0]
    if not len(gaps):
        return LOCKS[0]
    chance = 1 - (1 - float(risky.mean())) ** (np.array(LOCKS) + 1)
    covered = np.array([np.count_nonzero(gaps <= lock + 1) / len(steps) for lock in LOCKS])
    excess = covered - chance
    if (excess <= 2 * np.sqrt(chance * (1 - chance) / len(steps))).all():
        return LOCKS[0]
    return LOCKS[int(np.flatnonzero(excess >= 0.9 * excess.max())[0])]
