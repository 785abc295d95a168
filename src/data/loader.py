"""Makes this host's rows of training batches, ahead of time.

A row's contents depend on the data, the entries of their fingerprint and the row's number, but not on how many hosts
there are, unless a source is a `StreamSource`.

B: rows of a batch, over all hosts.  T: tokens per row.  S: sources.
"""

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from src.data.batch_schedule import BatchSchedule, RowAssignment
from src.data.document_stream import encode
from src.data.packing import SourcePacker, empty_batch
from src.data.source_packer import SourceStart, source_packer
from src.data.types import START, DataPosition, InputSpec, RowArrays, Rows, RowSource, Source, TrainData, is_stream
from src.system.errors import UserError

_BATCHES_AHEAD = 6  # lets threads drift apart by a few batches without waiting for each other


class HostBatch(NamedTuple):
    """Holds this host's rows of a batch."""

    arrays: RowArrays
    rows: np.ndarray  # int [rows], ascending: their numbers in the global batch
    stream_positions: np.ndarray  # int32 [streams, S, 2]: where this host's packing streams resume
    cuts: np.ndarray  # int32 [rows, 2]: `packing.Truncation` of each row
    saved: dict[str, Any]  # state from which each `StreamSource`, by name, resumes


def train_batches(
    inputs: InputSpec,
    data: TrainData,
    streams: Rows,
    global_batch: int,
    position: DataPosition = START,
    schedule: BatchSchedule | None = None,
    first_step: int = 0,
) -> Generator[HostBatch]:
    """Yields endless batches, made ahead of time in threads. Errors there are raised here; closing ends the threads.

    `streams` are the packing streams whose rows this host makes: without a ramp, these are the rows' numbers in the
    global batch (see `host_rows`). `schedule` has the batch sizes; None: always `global_batch`. `first_step` is the
    number of steps made before.
    Raises UserError if a source has fewer tokens than one row.
    """
    packers = []
    for index, (name, source) in enumerate(zip(data.names, data.sources, strict=True)):
        length, of = inputs.batch.max_target_length, f" of {name}" if name else ""
        if (targets := count_targets(inputs, source, length)) < length:
            raise UserError(
                f"the training data{of} have {targets} tokens, fewer than one row of max_target_length={length}: set "
                "max_target_length to less, or give a dataset_path with more text"
            )
        start = SourceStart(
            rows=position.rows_before.get(name, 0),
            positions=None if position.streams is None else position.streams[streams, index],
            saved=position.saved.get(name),
        )
        packers.append(source_packer(inputs, source, streams, global_batch, name, start))
    schedule = schedule or BatchSchedule(global_batch)
    loader = HostBatchLoader(inputs, packers, data.weights, streams, schedule)
    return loader.batches(position.rows_taken, first_step)


class HostBatchLoader:
    """Makes this host's rows of batches, which its packing `streams` fill; each source has a packer and a weight.

    The streams are split among `data_threads` threads. Rows take different times to make, so a thread waits for the
    others only when it is several batches ahead of them. Raises as `UserTransform` does.
    """

    def __init__(
        self,
        inputs: InputSpec,
        packers: list[SourcePacker],
        weights: Sequence[float],
        streams: Rows,
        schedule: BatchSchedule,
    ) -> None:
        self._inputs, self._packers, self._streams, self._schedule = inputs, packers, streams, schedule
        self._assign: Callable[[int], tuple[int, int]] = lambda row: (0, row)  # a row's source, and number in it
        if len(packers) > 1:
            from src.data.mixture import Mixture

            order = {"global_batch": schedule.rows, "seed": inputs.data.data_shuffle_seed}
            self._assign = functools.partial(Mixture(weights).assign, **order)
        self._closing = threading.Event()  # once it is set, threads do not start another row
        self._transform = None
        if inputs.batch.batch_transform:
            from src.data.user_transform import UserTransform

            self._transform = UserTransform(inputs.batch, inputs.vocab_size)

    def batches(self, rows_taken: int, first_step: int = 0, count: int | None = None) -> Generator[HostBatch]:
        """Yields `count` batches, or endless ones, after `rows_taken` rows of the run; threads make them ahead of time.

        An error in a thread is raised here at its batch. The threads end when the iterator is closed or garbage
        collected, which waits only for the rows in progress.
        """
        workers = 1 if any(packer.saved() for packer in self._packers) else self._inputs.data.data_threads
        threads = [ThreadPoolExecutor(1, thread_name_prefix="rows") for _ in range(workers)]
        finisher = ThreadPoolExecutor(1, thread_name_prefix="data")
        try:
            starts = itertools.islice(self._schedule.starts(first_step, rows_taken), count)
            begun = (finisher.submit(self._finish, *self._begin(threads, *start)) for start in starts)
            ahead = collections.deque(itertools.islice(begun, _BATCHES_AHEAD))
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(itertools.islice(begun, 1))
                yield batch
        finally:
            self._closing.set()
            for thread in (*threads, finisher):
                for packer in self._packers:  # each time, because a row in progress may request more reads
                    packer.close()
                thread.shutdown(cancel_futures=True)

    def _begin(self, threads: list[ThreadPoolExecutor], first: int, size: int) -> tuple[HostBatch, list[Future[None]]]:
        """Starts the batch of `size` rows from `first` on: thread n of N fills the host's streams n, n + N, ...

        Returns the batch, and for each thread a future that ends when its rows are filled.
        """
        rows, assigned = self._schedule.on_host(first, size, self._streams)
        count, length = len(self._streams), self._inputs.batch.max_target_length
        arrays = empty_batch(len(rows), length, self._inputs.count_bytes is not None)
        positions = np.empty((count, len(self._packers), 2), np.int32)
        batch = HostBatch(arrays, rows, positions, np.empty((len(rows), 2), np.int32), {})
        return batch, [
            thread.submit(self._fill, batch, assigned, range(n, count, len(threads)))
            for n, thread in enumerate(threads)
        ]

    def _finish(self, batch: HostBatch, shares: list[Future[None]]) -> HostBatch:
        for share in shares:
            share.result()
        if not self._transform:
            return batch
        return batch._replace(arrays=self._transform(batch.arrays))

    def _fill(self, batch: HostBatch, rows: Sequence[RowAssignment], places: range) -> None:
        for number, row, place in rows:
            if self._closing.is_set():
                raise CancelledError
            if place in places:
                source, ordinal = self._assign(number)
                batch.cuts[row] = self._packers[source].fill(batch.arrays, row, ordinal, place)
        for place in places:
            batch.stream_positions[place] = [packer.position(place) for packer in self._packers]
        batch.saved.update({packer.name: saved for packer in self._packers if (saved := packer.saved())})


def count_targets(inputs: InputSpec, source: Source | RowSource, enough: int) -> int:
    """Counts the targets of a source, stopping at `enough`, usually after a few reads, which raise as `encode` does."""
    if isinstance(source, RowSource) or is_stream(source):
        return enough  # without reading: a row is never empty
    targets = 0
    for i in range(len(source)):
        if targets >= enough:
            break
        targets += sum(max(len(document.ids) - 1, 0) for document in encode(inputs, source[i]))
    return targets
