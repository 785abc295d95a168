"""The order of documents: integers only, no state. Where a document comes is computed, never stored."""

import functools
import hashlib
from typing import TypeVar

import numpy as np

Words = TypeVar("Words", int, np.ndarray)

_MASK = (1 << 64) - 1
_ROUNDS = 6


def mix64(x: Words) -> Words:
    """A bijection of 64-bit words whose output bits each depend on all input bits (the finaliser of SplitMix64).

    Takes a Python int in [0, 2**64) or an array of uint64, so that one hash serves both loops and arrays.
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=64)
def keys(*what: int | str) -> tuple[int, ...]:
    """Six 64-bit hash keys, unrelated for any two different tuples: (5, epoch 1) has nothing of (6, epoch 0)."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


def permute(i: int, n: int, seed: int, source: int, epoch: int) -> int:
    """Element `i` of a pseudo-random permutation of range(n), in O(1) time and without memory.

    A Feistel network permutes the words of as many bits as n - 1 has; results outside [0, n) are permuted again until
    they fall inside ("cycle walking", Black and Rogaway 2002), which is again a bijection. That takes less than two
    passes on average, as fewer than half of the words are outside.

    Args:
        i: which element, in [0, n).
        n: how many documents the source has.
        seed: `data_shuffle_seed`.
        source: index of the source in a mixture.
        epoch: how often the source has been gone through before.
    """
    low_bits = (n - 1).bit_length() // 2
    low_mask = (1 << low_bits) - 1
    high_mask = (1 << ((n - 1).bit_length() - low_bits)) - 1
    round_keys = keys("permute", seed, source, epoch)
    while True:
        high, low = i >> low_bits, i & low_mask
        for key in range(0, _ROUNDS, 2):
            high ^= mix64(low ^ round_keys[key]) & high_mask
            low ^= mix64(high ^ round_keys[key + 1]) & low_mask
        i = high << low_bits | low
        if i < n:
            return i
