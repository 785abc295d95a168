"""Computes the source of each row of a run, from integers only, without any stored state."""

import heapq
from collections.abc import Sequence

import numpy as np

from src.config.dataset_spec import whole_numbers
from src.data.order import permute


class Mixture:
    """Assigns the rows 0, 1, 2, ... of a run to sources; any first n rows have each source's share to within one row.

    A source's share is its weight over the sum of weights, in rows, not tokens. The schedule is proportionately fair
    (Baruah, Cohen, Plaxton and Varvel, "Proportionate Progress", 1996): row number k of a source with share w belongs
    between rows floor(k / w) and ceil((k + 1) / w); among the sources whose next row is eligible, the one with the
    earliest deadline is taken. That keeps every source's count after n rows within one of n w. Raises UserError as
    `whole_numbers` does.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = whole_numbers(weights)
        self._period = sum(self._shares)
        self._source, self._before = _schedule(self._shares)

    def at(self, row: int) -> tuple[int, int]:
        """Returns the source of a row of the run, and the number of earlier rows from the same source."""
        turns, place = divmod(row, self._period)
        source = int(self._source[place])
        return source, turns * self._shares[source] + int(self._before[place])

    def count(self, source: int, rows: int) -> int:
        """Counts how many of the first `rows` rows of the run are from a source."""
        turns, place = divmod(rows, self._period)
        return turns * self._shares[source] + int(np.count_nonzero(self._source[:place] == source))

    def assign(self, row: int, global_batch: int, seed: int) -> tuple[int, int]:
        """Returns the result of `at` for a permuted row, so that the schedule is shuffled within each full batch.

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
