"""Computes which source each row of a run is from: exact weights, integers only, no state."""

import heapq
from collections.abc import Sequence

import numpy as np

from src.config.source_spec import whole_numbers
from src.data import order


class Mixture:
    """Assigns the rows 0, 1, 2, ... of a run to sources, each of which has its share of any first n rows to within one.

    Weights count rows. The schedule is that of proportionately fair scheduling (Baruah, Cohen, Plaxton and Varvel,
    "Proportionate Progress", 1996): row number k of a source with share w belongs between rows floor(k / w) and
    ceil((k + 1) / w), and of the sources whose next row may come that with the earliest end is taken. That keeps every
    source's count after n rows within one of n w. Raises UserError as `whole_numbers` does.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = whole_numbers(weights)
        self._period = sum(self._shares)
        self._source, self._before = _schedule(self._shares)

    def at(self, row: int) -> tuple[int, int]:
        """Returns the source of a row of the run, and how many earlier rows have the same one."""
        turns, place = divmod(row, self._period)
        source = int(self._source[place])
        return source, turns * self._shares[source] + int(self._before[place])

    def count(self, source: int, rows: int) -> int:
        """Counts the rows from a source among the first `rows` rows of the run."""
        turns, place = divmod(rows, self._period)
        return turns * self._shares[source] + int(np.count_nonzero(self._source[:place] == source))

    def assign(self, before: int, rows: Sequence[int], global_batch: int, seed: int) -> list[tuple[int, int]]:
        """Returns `at` of the rows of this host in a batch of `global_batch` that comes after `before` rows of the run.

        Inside a batch rows are assigned in random order: where the schedule's period and the batch have a common
        divisor, row j of every batch would otherwise have the same few sources.
        """
        if len(self._shares) == 1:
            return [(0, before + int(row)) for row in rows]
        return [self.at(before + order.permute(int(row), global_batch, seed, source=-1, epoch=before)) for row in rows]


def _schedule(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each row of a period, and how many earlier rows of the period have the same one."""
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
