"""Finds stored records by number."""

import itertools
from collections.abc import Sequence

import numpy as np

from src.system.errors import say

Content = str | np.ndarray  # a document's text, or its ids as int32 [n]


class Index:
    """Finds the group that contains an item, given the item counts of consecutive groups, such as files of records."""

    def __init__(self, counts: Sequence[int] | np.ndarray) -> None:
        # int64 [groups + 1]: the number of items before each group, then the total.
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, i: int) -> tuple[int, int]:
        """Locates item `i`: its group, and its number in the group."""
        group = int(np.searchsorted(self.starts, i, side="right")) - 1
        return group, i - int(self.starts[group])


class Nulls:
    """Replaces null documents of a source by empty ones, and prints their count when it is 1, 10, 100, ..."""

    def __init__(self, setting: str) -> None:
        self._setting, self._counts = setting, itertools.count(1)

    def __call__(self, document: Content | None) -> Content:
        """Passes a document through, or counts a null and replaces it by an empty text; safe to call from threads."""
        if document is not None:
            return document
        if str(count := next(self._counts)).strip("0") == "1":
            say([f"{self._setting}: null documents read so far, as empty ones: {count:,}"])
        return ""
