"""Shuffles documents that are stored together, such as the rows of a Parquet row group, without separating them."""

import functools

import numpy as np

from src.data.order import permute


class GroupShuffle:
    """Shuffles consecutive groups of items endlessly, and the items of each group, in a new order each epoch.

    Each group is therefore read about once an epoch. `group_sizes` has the sizes of the groups, in order.
    """

    def __init__(self, group_sizes: np.ndarray, seed: int, source: int | str) -> None:
        self._sizes, self._seed, self._source = group_sizes, seed, source
        self._count = int(group_sizes.sum())
        self._starts = np.cumsum(group_sizes) - group_sizes
        # Rows of a batch may be in two successive epochs for a while, so the orders of both are cached.
        self._groups = functools.lru_cache(maxsize=2)(self._shuffled_groups)

    def __call__(self, ordinal: int) -> int:
        """Maps item `ordinal` of the stream to its number in the source."""
        epoch, i = divmod(ordinal, self._count)
        groups, ends = self._groups(epoch)
        place = int(np.searchsorted(ends, i, side="right"))
        group = groups[place]
        size = int(self._sizes[group])
        # The group is part of the seed: groups of equal size would otherwise share one order.
        inside = permute(i - int(ends[place]) + size, size, self._seed, f"{self._source} group {group}", epoch)
        return int(self._starts[group]) + inside

    def _shuffled_groups(self, epoch: int) -> tuple[list[int], np.ndarray]:
        number = len(self._sizes)
        # Epochs of items are never negative, so the order of groups is independent of the order inside each group.
        groups = [permute(i, number, self._seed, self._source, -1 - epoch) for i in range(number)]
        return groups, np.cumsum(self._sizes[groups])
