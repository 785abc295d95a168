"""Says how many rows each step of a run takes, and which: a batch has one size, or grows to it in a ramp.

B: rows of the full batch, over all hosts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from src.config.schema import BatchKeys
from src.system.errors import counted, first_few

RAMP_KEYS = (
    *("enable_rampup_batch_size", "per_device_batch_size_start", "per_device_batch_size_increment"),
    "global_rampup_samples",
)


def size_keys(ramped: bool) -> tuple[str, ...]:
    """Returns the keys that count rows per device and micro-batch: of the full batch, and of a ramp to it."""
    return ("per_device_batch_size", *(RAMP_KEYS[1:3] if ramped else ()))


class RowAssignment(NamedTuple):
    """Assigns a row of a host's batch to a packing stream."""

    number: int  # of the row in the run
    row: int  # of the host's batch
    place: int  # of its packing stream among the host's


@dataclass(frozen=True)
class BatchSchedule:
    """The rows of a run are numbered from 0, and each step takes the next `size(step)` of them.

    Row n is filled by packing stream n mod B at every size: it is the row that it would be without a ramp.
    """

    rows: int  # B
    ramp: tuple[tuple[int, int], ...] = ()  # (rows, steps) of each smaller batch, in their order
    shards: int = 1  # parts in which devices have the rows of a batch; each divides by it

    @classmethod
    def of(cls, keys: BatchKeys, rows_of: Callable[[float, str], int], shards: int = 1) -> Self:
        """Returns a run's schedule. `rows_of` counts a batch's rows by those of a device, and the key for its errors.

        As in MaxText, each of the ramp's n sizes lasts for as many steps as take global_rampup_samples / n rows.
        """
        rows = rows_of(keys.per_device_batch_size, "per_device_batch_size")
        if not keys.enable_rampup_batch_size:
            return cls(rows)
        start, increment = keys.per_device_batch_size_start, keys.per_device_batch_size_increment
        count = round((keys.per_device_batch_size - start) / increment)
        names = [RAMP_KEYS[1], *(f"{RAMP_KEYS[1]} + {n} x {RAMP_KEYS[2]}" for n in range(1, count))]
        sizes = [rows_of(start + n * increment, name) for n, name in enumerate(names)]
        return cls(rows, tuple((size, -(-keys.global_rampup_samples // (count * size))) for size in sizes), shards)

    def size(self, step: int) -> int:
        """Returns the rows of the batch of update `step`, counted from 0."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def rows_before(self, step: int) -> int:
        """Counts the rows of all batches before that of `step`."""
        taken = 0
        for rows, steps in self.ramp:
            taken += rows * min(step, steps)
            step -= min(step, steps)
        return taken + self.rows * step

    def changes_at(self, step: int) -> bool:
        """Returns whether the batch of `step` has another size than the one before."""
        return step > 0 and self.size(step) != self.size(step - 1)

    def starts(self, step: int, rows_taken: int) -> Iterator[tuple[int, int]]:
        """Yields the first row and the size of the batches from `step` on, which comes after `rows_taken` rows."""
        while True:
            yield rows_taken, self.size(step)
            rows_taken, step = rows_taken + self.size(step), step + 1

    def batch(self, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of `size` rows from `first` on, int [size], in their order on devices; and their streams.

        In a ramp, shard i of a batch has the rows n with n mod `shards` = i. So at every size a device has rows of the
        same streams, and no host needs the position of another's.
        """
        numbers = np.arange(first, first + size)
        if not self.ramp:
            return numbers, np.arange(size)
        numbers = numbers[np.argsort(numbers % self.shards, kind="stable")]
        return numbers, numbers % self.rows

    def on_host(self, first: int, size: int, streams: Sequence[int]) -> tuple[np.ndarray, list[RowAssignment]]:
        """Returns which rows of that batch a host with these streams has, int [rows], and what it fills them with."""
        places = np.full(self.rows, -1)
        places[streams] = np.arange(len(streams))
        numbers, filled_by = self.batch(first, size)
        rows = np.flatnonzero(places[filled_by] >= 0)
        by_row = zip(numbers[rows].tolist(), range(len(rows)), places[filled_by[rows]].tolist(), strict=True)
        return rows, sorted(map(RowAssignment._make, by_row))

    def streams(self) -> np.ndarray:
        """Returns which packing streams fill the rows of a full batch, int [B], in the order that devices have."""
        return self.batch(0, self.rows)[1]

    def fingerprint(self) -> dict[str, str]:
        """Returns what the data's fingerprint says of a ramp."""
        sizes = ", ".join(f"{counted(rows, 'row')} in {counted(steps, 'step')}" for rows, steps in self.ramp)
        return {"batch ramp": sizes} if self.ramp else {}

    def describe(self, steps: int) -> str:
        """Returns the ramp of a run of `steps` in words, with steps counted from 1 as they are printed."""
        ends = np.cumsum([count for _, count in self.ramp]).tolist()
        sizes = [f"{counted(rows, 'row')} to step {end:,}" for (rows, _), end in zip(self.ramp, ends, strict=True)]
        full = f"{self.rows:,} from step {ends[-1] + 1:,} on, after {self.rows_before(ends[-1]):,} rows"
        return f"{first_few(sizes)}, {full}" + ", which this run does not come to" * (ends[-1] >= steps)
