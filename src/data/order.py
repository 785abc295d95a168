"""Computes the order of documents and of sources from integers only, without any stored state."""

import functools
import hashlib
import heapq
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from src.config.dataset_spec import whole_numbers

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


class Mixture:
    """Assigns the rows 0, 1, 2, ... of a run to sources; any first n rows have each source's share to within one row.

    Weights count rows. The schedule is proportionately fair (Baruah, Cohen, Plaxton and Varvel, "Proportionate
    Progress", 1996): row number k of a source with share w belongs between rows floor(k / w) and ceil((k + 1) / w);
    among the sources whose next row is eligible, the one with the earliest deadline is taken. That keeps every source's
    count after n rows within one of n w. Raises UserError as `whole_numbers` does.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = whole_numbers(weights)
        self._period = sum(self._shares)
        self._source, self._before = _schedule(self._shares)

    def at(self, row: int) -> tuple[int, int]:
        """Finds the source of a row of the run, and counts the earlier rows from the same source."""
        turns, place = divmod(row, self._period)
        source = int(self._source[place])
        return source, turns * self._shares[source] + int(self._before[place])

    def count(self, source: int, rows: int) -> int:
        """Counts how many of the first `rows` rows of the run are from a source."""
        turns, place = divmod(rows, self._period)
        return turns * self._shares[source] + int(np.count_nonzero(self._source[:place] == source))

    def assign(self, row: int, global_batch: int, seed: int) -> tuple[int, int]:
        """Shuffles the schedule within each full batch: gives `row` the result of `at` for a random row of its batch.

        If the schedule's period and the batch have a common divisor, row j of every batch would otherwise have the same
        few sources. A smaller batch of a ramp takes some of the `global_batch` rows of a full batch.
        """
        if len(self._shares) == 1:
            return 0, row
        before, place = row - row % global_batch, row % global_batch
        return self.at(before + permute(place, global_batch, seed, source=-1, epoch=before))


def _schedule(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Computes the source of each row of a period, and the number of earlier rows in the period from that source."""
    period = sum(shares)
    source, before = np.empty(period, np.int32), np.empty(period, np.int64)
    coming = [(0, index, 0) for index, share in enumerate(shares) if share]  # (earliest row, source, number)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, number)
    for row in range(period):
        while coming and coming[0][0] <= row:
            _, index, number = heapq.heappop(coming)
            heapq.heappush(ready, (-(-(number + 1) * period // shares[index]), index, number))
        _, index, number = heapq.heappop(ready)
        source[row], before[row] = index, number
        heapq.heappush(coming, ((number + 1) * period // shares[index], index, number + 1))
    return source, before
