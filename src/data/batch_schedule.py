"""Schedules the rows of each step of a run: batches of one size, or a ramp that grows to that size.

B: rows of the full batch, over all hosts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from src.config.schema import BatchKeys
from src.data.types import Rows
from src.system.errors import counted, first_few

RAMP_KEYS = (
    *("enable_rampup_batch_size", "per_device_batch_size_start", "per_device_batch_size_increment"),
    "global_rampup_samples",
)


def size_keys(ramped: bool) -> tuple[str, ...]:
    """Lists the keys that count rows per device and micro-batch, for the full batch and if `ramped` for the ramp."""
    return ("per_device_batch_size", *(RAMP_KEYS[1:3] if ramped else ()))


class RowAssignment(NamedTuple):
    """Assigns a row of a host's batch to a packing stream."""

    number: int  # the row's number in the run
    row: int  # its index in the host's batch
    place: int  # index of its packing stream among the host's streams


@dataclass(frozen=True)
class BatchSchedule:
    """Numbers the rows of a run from 0 and gives each step the next `size(step)` of them.

    Packing stream n mod B fills row n at every batch size, so a ramp does not change the contents of any row.
    """

    rows: int  # B
    ramp: tuple[tuple[int, int], ...] = ()  # (rows, steps) of each smaller batch size, in order
    shards: int = 1  # shards of a batch's rows; every batch size is a multiple of it

    @classmethod
    def of(cls, keys: BatchKeys, rows_of: Callable[[float, str], int], shards: int = 1) -> Self:
        """Builds a run's schedule. `rows_of(rows per device, key)` returns a batch's rows; its errors name the key.

        As in MaxText, each of the ramp's n sizes lasts for the fewest steps that take at least global_rampup_samples /
        n rows.
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
        """Counts the rows in the batch of update `step`, which is counted from 0."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def rows_before(self, step: int) -> int:
        """Counts the rows in all batches before the batch of `step`."""
        taken = 0
        for rows, steps in self.ramp:
            taken += rows * min(step, steps)
            step -= min(step, steps)
        return taken + self.rows * step

    def changes_at(self, step: int) -> bool:
        """Tells whether the batch of `step` differs in size from the batch before it."""
        return step > 0 and self.size(step) != self.size(step - 1)

    def starts(self, step: int, rows_taken: int) -> Iterator[tuple[int, int]]:
        """Yields (first row, size) of each batch from `step` on, given the number of rows in earlier batches."""
        while True:
            yield rows_taken, self.size(step)
            rows_taken, step = rows_taken + self.size(step), step + 1

    def batch(self, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Orders `size` rows from `first` on as devices hold them: row numbers, int [size], and their packing streams.

        In a ramp, shard i of a batch has the rows n with n mod `shards` = i. So a device has rows of the same streams
        at every size, and no host needs the position of another host's stream.
        """
        numbers = np.arange(first, first + size)
        if not self.ramp:
            return numbers, np.arange(size)
        numbers = numbers[np.argsort(numbers % self.shards, kind="stable")]
        return numbers, numbers % self.rows

    def on_host(self, first: int, size: int, streams: Rows) -> tuple[np.ndarray, list[RowAssignment]]:
        """Selects the rows of `batch(first, size)` that `streams`, this host's, fill.

        Returns their indices in the global batch, int [rows], and their assignments, in the order of row numbers.
        """
        places = np.full(self.rows, -1)
        places[streams] = np.arange(len(streams))
        numbers, filled_by = self.batch(first, size)
        rows = np.flatnonzero(places[filled_by] >= 0)
        by_row = zip(numbers[rows].tolist(), range(len(rows)), places[filled_by[rows]].tolist(), strict=True)
        return rows, sorted(map(RowAssignment._make, by_row))

    def streams(self) -> np.ndarray:
        """Lists the packing streams that fill the rows of a full batch, int [B], in device order."""
        return self.batch(0, self.rows)[1]

    def fingerprint(self) -> dict[str, str]:
        """Describes the ramp for the data's fingerprint; empty without a ramp."""
        sizes = ", ".join(f"{counted(rows, 'row')} in {counted(steps, 'step')}" for rows, steps in self.ramp)
        return {"batch ramp": sizes} if self.ramp else {}

    def describe(self, steps: int) -> str:
        """Describes the ramp, which must not be empty, in a run of `steps`, counted from 1 as in printed lines."""
        ends = np.cumsum([count for _, count in self.ramp]).tolist()
        sizes = [f"{counted(rows, 'row')} to step {end:,}" for (rows, _), end in zip(self.ramp, ends, strict=True)]
        full = f"{self.rows:,} from step {ends[-1] + 1:,} on, after {self.rows_before(ends[-1]):,} rows"
        return f"{first_few(sizes)}, {full}" + ", which this run does not reach" * (ends[-1] >= steps)
