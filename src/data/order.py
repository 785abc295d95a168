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
    """Shuffles the `count` items of a source endlessly, in a new random order each epoch."""

    def __init__(self, count: int, seed: int, source: int | str) -> None:
        self._count, self._seed, self._source = count, seed, source

    def __call__(self, ordinal: int) -> int:
        """Maps item `ordinal` of the stream to its number in the source."""
        epoch, i = divmod(ordinal, self._count)
        return permute(i, self._count, self._seed, self._source, epoch)
