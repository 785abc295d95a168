"""Finds stored records by number."""

import itertools
from collections.abc import Sequence

import numpy as np

from src.system.errors import say

Content = str | np.ndarray  # of a document: its text, or its ids as int32 [n]


class Index:
    """Finds the group of an item, of consecutive groups with these counts of items, such as the records of files."""

    def __init__(self, counts: Sequence[int] | np.ndarray) -> None:
        # int64 [groups + 1]: how many items there are before each group, and in all.
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, i: int) -> tuple[int, int]:
        """Returns the group of item `i`, and the item's number in the group."""
        group = int(np.searchsorted(self.starts, i, side="right")) - 1
        return group, i - int(self.starts[group])


class Nulls:
    """Has null documents of a source be empty, and prints how many were read at the first, tenth, ..."""

    def __init__(self, setting: str) -> None:
        self._setting, self._counts = setting, itertools.count(1)

    def __call__(self, document: Content | None) -> Content:
        """Returns a document, or if it is null an empty text; threads may call it."""
        if document is not None:
            return document
        if str(count := next(self._counts)).strip("0") == "1":
            say([f"{self._setting}: null documents read so far, as empty ones: {count:,}"])
        return ""
