"""Which examples share a sequence, epoch after epoch; a function of lengths and seed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def pack(lengths: IntArray, order: Iterable[int], capacity: int) -> list[list[int]]:
    """Put each example, in order, into the fullest sequence that still holds it (best fit).

    Args:
        lengths: [examples] places that each one takes, from 1 to `capacity`.
        order: the examples.
        capacity: places of a sequence.

    Returns:
        Examples of each sequence.
    """
    sequences: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit n: some sequence has n places left
    for example in order:
        need = int(lengths[example])
        fitting = spaces >> need
        if fitting:
            space = need + (fitting & -fitting).bit_length() - 1
            number = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, number = capacity, len(sequences)
            sequences.append([])
        sequences[number].append(example)
        left = space - need
        if left:
            with_space[left].append(number)
            spaces |= 1 << left
    return sequences


def plan_epoch(lengths: IntArray, capacity: int, seed: tuple[int, int, int]) -> list[list[int]]:
    """Sequences of one epoch: every example once, in an order drawn by the seed.

    Args:
        lengths: [examples] places that each one takes.
        capacity: places of a sequence.
        seed: of the run, of the part of the data, and the number of the epoch.
    """
    generator = np.random.default_rng(seed)
    sequences = pack(lengths, generator.permutation(len(lengths)).tolist(), capacity)
    return [sequences[index] for index in generator.permutation(len(sequences))]
