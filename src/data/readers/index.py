"""Numbers items that are stored in consecutive groups, such as the records of files."""

from collections.abc import Sequence

import numpy as np


class Index:
    """Finds the group of an item, of groups with these counts of items.

    Attributes:
        starts: int64 [groups + 1], how many items there are before each group, and in all.
    """

    def __init__(self, counts: Sequence[int] | np.ndarray) -> None:
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, i: int) -> tuple[int, int]:
        """Returns the group of item `i`, and the item's number in the group."""
        group = int(np.searchsorted(self.starts, i, side="right")) - 1
        return group, i - int(self.starts[group])
