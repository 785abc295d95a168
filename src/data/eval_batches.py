"""Makes the batches of an evaluation set: the same ones in each evaluation, the next ones, or one epoch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from src.data.batch_schedule import BatchSchedule
from src.data.document_stream import DocumentStream, layout_of, rows_per_epoch
from src.data.loader import HostBatchLoader, count_targets
from src.data.packing import RowLayout
from src.data.processes import max_over_hosts
from src.data.source_packer import SourceStart, source_packer
from src.data.types import EvalSet, InputSpec, RowArrays, Rows, RowSource, is_stream
from src.system.errors import UserError


class EvalBatches:
    """Makes the batches of one evaluation set: this host's `rows` of global batches of `global_batch` rows.

    With `steps` = N an evaluation takes N batches, and repeats the data if they run out. It takes the first N each
    time, or, if it `rolls` (`eval_mode`), the N after those of the last evaluation, beginning after `position`.
    With -1 it takes one epoch: each document once, padding at the end of the last rows, and the same number of batches
    on every host. If the source does not know that number, each host counts its rows at the first evaluation, and so
    reads and tokenizes its documents an extra time. Raises UserError if the source has no text, if it is endless and
    `steps` is -1, or if it `rolls` and can only be read from its start (`is_stream`); also as `source_packer` does, and
    as reading and tokenizing its first documents do.
    """

    def __init__(
        self,
        inputs: InputSpec,
        data: EvalSet,
        rows: Rows,
        global_batch: int,
        rolls: bool = False,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        self._one_epoch = data.steps == -1
        of = f" of {data.name}" if data.name else ""
        # Rows of an evaluation; None if each host has to count its own.
        row_count = rows_per_epoch(inputs, data.source) if self._one_epoch else data.steps * global_batch
        if row_count == math.inf:
            raise UserError(f"the evaluation data{of} are endless: set eval_steps to a number of batches")
        if not count_targets(inputs, data.source, 1):
            raise UserError(f"the evaluation data{of} have no text: give other data with eval_dataset_path=PATH")
        if rolls and is_stream(data.source):
            raise UserError(f"the evaluation data{of} are a stream, which restarts each time: set eval_mode=reset")
        self._inputs, self._source, self._rows, self._global_batch = inputs, data.source, rows, global_batch
        self._rolls, self._steps = rolls, None if row_count is None else math.ceil(row_count / global_batch)
        self._start(position)

    def __iter__(self) -> Iterator[RowArrays]:
        """Begins an evaluation: yields its batches, which threads prepare ahead of time.

        Moves `position` and `epochs` to the evaluation's end. Raises as reading and tokenizing documents do.
        """
        if not self._rolls:
            self._start(None)
        count, before = self.steps(), self._rows_taken
        self._rows_taken += count * self._global_batch
        schedule = BatchSchedule(self._global_batch)
        loader = HostBatchLoader(self._inputs, [self._packer], [1], self._rows, schedule)
        return (batch.arrays for batch in loader.batches(before, count=count))

    def steps(self) -> int:
        """Counts the batches of an evaluation.

        If the hosts have to count rows, the first call, also by `iter`, reads and tokenizes this host's documents, with
        their errors, and waits until all other hosts make it.
        """
        if self._steps is None:
            assert not isinstance(self._source, RowSource)
            stream, layout, max_rows = DocumentStream(self._inputs, self._source), layout_of(self._inputs), 0
            for row in self._rows:
                ordinals = range(row, len(self._source), self._global_batch)
                sizes = ([len(document.ids) for document in stream.documents(ordinal)] for ordinal in ordinals)
                max_rows = max(max_rows, rows_needed(sizes, self._inputs.batch.max_target_length, layout))
            # The longest packing stream of any host decides.
            self._steps = int(max_over_hosts(np.array(max_rows, np.int32)))
        return self._steps

    def position(self) -> dict[str, Any]:
        """Returns how far a rolling set has been read, over all hosts, as JSON; the next evaluation resumes there.

        All processes must call it, after they have taken an evaluation's last batch.
        """
        positions = np.full((self._global_batch, 2), np.iinfo(np.int32).min, np.int32)  # less than any real position
        positions[list(self._rows)] = [self._packer.position(row) for row in range(len(self._rows))]
        # Checkpoints call packing streams "lanes".
        return {"rows_taken": self._rows_taken, "lanes": max_over_hosts(positions).tolist()}

    def epochs(self) -> float:
        """Counts the epochs in the batches taken so far. All processes must call it, as for `position`."""
        if (rows := rows_per_epoch(self._inputs, self._source)) is not None:
            return self._rows_taken / rows
        from src.data.stream_positions import documents_consumed

        assert not isinstance(self._source, RowSource)
        return float(documents_consumed(np.array(self.position()["lanes"], np.int32)).sum()) / len(self._source)

    def _start(self, position: Mapping[str, Any] | None) -> None:
        self._rows_taken, positions = 0, None
        if position is not None:
            self._rows_taken, positions = position["rows_taken"], np.array(position["lanes"], np.int32)
            if len(positions) != self._global_batch:
                from src.data.stream_positions import remap_position

                positions = remap_position(positions, self._global_batch)
            positions = positions[list(self._rows)]
        self._packer = source_packer(
            self._inputs,
            self._source,
            self._rows,
            self._global_batch,
            start=SourceStart(positions=positions),
            one_epoch=self._one_epoch,
        )


def rows_needed(items: Iterable[Sequence[int]], length: int, layout: RowLayout) -> int:
    """Counts the rows of `length` targets that a stream fills; `items`: for each item, its documents' sizes in ids."""
    sizes_of = dict(enumerate(tuple(size - 1 for size in item if size > 1) for item in items)).get
    position, rows = (0, 0), 0
    while True:
        segments, position = layout(sizes_of, position, length)
        if not segments:
            return rows
        rows += 1
