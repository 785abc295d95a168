"""Computes the order of documents from integers only, without any stored state."""

import functools
import hashlib
from typing import Any, TypeVar

import numpy as np

Words = TypeVar("Words", int, np.ndarray)

_MASK = (1 << 64) - 1
_ROUNDS = 6


def mix64(x: Words) -> Words:
    """Mixes all bits of 64-bit words, an int or an array of uint64, by a bijection (SplitMix64's finaliser)."""
    word: Any = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


@functools.lru_cache(maxsize=64)
def hash_keys(*seeds: int | str) -> tuple[int, ...]:
    """Derives six 64-bit hash keys, unrelated for any two tuples: (5, epoch 1) shares no key with (6, epoch 0)."""
    digest = hashlib.blake2b(repr(seeds).encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


def permute(i: int, n: int, seed: int, source: int | str, epoch: int) -> int:
    """Computes element `i` of a pseudo-random permutation of range(n), in O(1) time and without memory.

    A Feistel network permutes words with the bit length of n - 1; results outside [0, n) are permuted again until they
    fall inside ("cycle walking", Black and Rogaway 2002), which is also a bijection. That takes fewer than two passes
    on average. `source` is the name of the source in a mixture; 0 for a single source.
    """
    low_bits = (n - 1).bit_length() // 2
    low_mask = (1 << low_bits) - 1
    high_mask = (1 << ((n - 1).bit_length() - low_bits)) - 1
    round_keys = hash_keys("permute", seed, source, epoch)
    while True:
        high, low = i >> low_bits, i & low_mask
        for key in range(0, _ROUNDS, 2):
            high ^= mix64(low ^ round_keys[key]) & high_mask
            low ^= mix64(high ^ round_keys[key + 1]) & low_mask
        i = high << low_bits | low
        if i < n:
            return i


class Shuffle:
    """Shuffles the `count` items of a source endlessly, in a new random order each epoch.

    Items that are stored together, such as the rows of a Parquet row group, stay together: the groups are shuffled, and
    so are the items of each group. Each group is therefore read about once an epoch. `group_sizes` has the sizes of the
    groups, in order.
    """

    def __init__(self, count: int, seed: int, source: int | str, group_sizes: np.ndarray | None = None) -> None:
        self._count, self._seed, self._source, self._sizes = count, seed, source, group_sizes
        if group_sizes is not None:
            assert group_sizes.sum() == count
            self._starts = np.cumsum(group_sizes) - group_sizes
            # Rows of a batch may be an epoch apart for a while, so the orders of two epochs are needed at a time.
            self._groups = functools.lru_cache(maxsize=2)(functools.partial(self._shuffled_groups, group_sizes))

    def __call__(self, ordinal: int) -> int:
        """Maps item `ordinal` of the stream to its number in the source."""
        epoch, i = divmod(ordinal, self._count)
        if self._sizes is None:
            return permute(i, self._count, self._seed, self._source, epoch)
        groups, ends = self._groups(epoch)
        place = int(np.searchsorted(ends, i, side="right"))
        group = groups[place]
        size = int(self._sizes[group])
        # The group is part of the seed: groups of equal size would otherwise share one order.
        inside = permute(i - int(ends[place]) + size, size, self._seed, f"{self._source} group {group}", epoch)
        return int(self._starts[group]) + inside

    def _shuffled_groups(self, sizes: np.ndarray, epoch: int) -> tuple[list[int], np.ndarray]:
        number = len(sizes)
        # Epochs of items are never negative, so the order of groups is independent of the order inside each group.
        groups = [permute(i, number, self._seed, self._source, -1 - epoch) for i in range(number)]
        return groups, np.cumsum(sizes[groups])
