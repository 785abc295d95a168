"""Packs documents into rows, so that a run can stop after any row and resume exactly there.

Packing stream j fills row j of every batch (in a ramp, stream n mod B fills row n of the run). Streams are independent:
hosts share nothing, and any number of hosts gives the same batches. A document of n ids has n - 1 inputs, `ids[:-1]`,
with the targets `ids[1:]`; sizes, offsets and the length of a row all count targets. Each target of a stream's items
comes exactly once an epoch, wherever rows are cut. A layout plans the rows: texts are concatenated and cut at T
(`best_fit` in src/extras/conversation_packing.py is for conversations).

T: tokens per row.  B: rows of a batch, over all hosts.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from src.data.types import BATCH_ARRAYS, NOT_TEXT, Document, RowArrays
from src.system.errors import UserError

MAX_EMPTY_DOCUMENTS = 10_000  # in succession; one more is an error

# Maps an ordinal (an item's number in the endless stream over all epochs) to the item's documents: one, or for some
# conversations one for each turn of the assistant.
Items = Callable[[int], Sequence[Document]]

# Maps item k of a stream to the sizes of its documents in targets: () if it is empty, None past the end.
Sizes = Callable[[int], Sequence[int] | None]

# The point at which a stream resumes: (finished items, targets taken from the next item). `best_fit` encodes the second
# number differently: a negative one has PLACED_BITS bits that mark later items as finished.
Position = tuple[int, int]
PLACED_BITS = 19


class Segment(NamedTuple):
    """A segment of a row: targets [first, first + length) of document number `document` of item number `item`."""

    item: int
    document: int
    first: int
    length: int


# Plans the next row of `length` tokens: its segments (none past the end), and the position after it.
RowLayout = Callable[[Sizes, Position, int], tuple[list[Segment], Position]]


class Truncation(NamedTuple):
    """Whether a row has documents without their start or end."""

    start: bool  # a document began in an earlier row
    end: bool  # a document continues in a later row, or its rest is dropped (long_documents=truncate)


def empty_batch(rows: int, length: int, counts_bytes: bool = False) -> RowArrays:
    """Makes rows of padding: the arrays of `BATCH_ARRAYS`, [rows, T], and `text_bytes` if `counts_bytes`."""
    counted = {"text_bytes": np.full((rows, length), NOT_TEXT, np.int32)} if counts_bytes else {}
    return {name: np.zeros((rows, length), dtype) for name, dtype in BATCH_ARRAYS.items()} | counted


def fill_row(batch: RowArrays, row: int, parts: Iterable[tuple[Document, int, int]]) -> Truncation:
    """Writes `parts`, (document, first target, number of targets), into a row of padding; cuts what exceeds the row.

    Returns whether the row has documents without their start or end.
    """
    filled, start, end = 0, False, False
    for segment_id, (document, first, length) in enumerate(parts, 1):
        length = min(length, batch["tokens"].shape[1] - filled)
        # The inputs of targets `first` to `first + length` are the ids from `first` on; the targets are one id later.
        columns, targets = (row, slice(filled, filled + length)), slice(first + 1, first + 1 + length)
        batch["tokens"][columns] = document.ids[first : first + length]
        batch["targets"][columns] = document.ids[targets]
        batch["segment_ids"][columns] = segment_id
        batch["positions"][columns] = np.arange(length)
        batch["loss_mask"][columns] = 1 if document.loss_mask is None else document.loss_mask[targets]
        if document.text_bytes is not None:
            batch["text_bytes"][columns] = document.text_bytes[targets]
        filled += length
        start |= first > 0
        end |= first + length < len(document.ids) - 1
    return Truncation(start, end)


def concatenate(
    sizes_of: Sizes, position: Position, length: int, max_segments: float = inf
) -> tuple[list[Segment], Position]:
    """Plans a row, as a `RowLayout`: the next documents, at most `max_segments`, until the row is full.

    The rest of a document that is cut begins the next row.
    """
    item, offset = position[0], max(position[1], 0)  # below 0 in positions of `best_fit`: items placed early repeat
    segments: list[Segment] = []
    free = length
    while free and len(segments) < max_segments and (sizes := sizes_of(item)) is not None:
        if part := next(remaining(sizes, offset), None):
            document, first, rest = part
            taken = min(rest, free)
            segments.append(Segment(item, document, first, taken))
            offset, free = offset + taken, free - taken
        if offset >= sum(sizes):
            item, offset = item + 1, 0
    return segments, (item, offset)


# Gives each document its own row. The rest of a document that exceeds the row begins the next row.
one_per_row: RowLayout = functools.partial(concatenate, max_segments=1)


def remaining(sizes: Sequence[int], offset: int) -> Iterator[tuple[int, int, int]]:
    """Yields (document, first target, number of targets) for an item's documents with targets left after `offset`."""
    # There may be no such document: after an accepted change of data, a document can be shorter than `offset`.
    for document, size in enumerate(sizes):
        if offset < size:
            yield document, max(offset, 0), size - max(offset, 0)
        offset -= size


class PackingStream:
    """Packs the items with ordinals `first`, `first + stride`, ... into rows.

    `first` is the stream's number j, `stride` the number of streams B. Ordinals from `end` on don't exist; after the
    last one the stream's rows are padding. `position` is the point at which the stream resumes after the rows so far.
    """

    def __init__(
        self, items: Items, first: int, stride: int, layout: RowLayout, position: Position = (0, 0), end: float = inf
    ) -> None:
        self._items, self._stride, self._layout, self._end = items, stride, layout, end
        self._first = int(first)  # rows and positions are NumPy ints, which would overflow in the order's hash
        self._unfinished: dict[int, tuple[Sequence[Document], tuple[int, ...]]] = {}  # by item: documents, and sizes
        self._empty_items = 0  # in succession
        self.position: Position = (int(position[0]), int(position[1]))

    def fill(self, batch: RowArrays, row: int) -> Truncation:
        """Writes the stream's next row into row `row` of `batch`, still padding.

        Raises UserError for more than MAX_EMPTY_DOCUMENTS empty items in succession, unless the stream has an `end`.
        """
        self._empty_items = 0
        segments, self.position = self._layout(self._sizes, self.position, batch["tokens"].shape[1])
        cuts = fill_row(
            batch, row, ((self._unfinished[item][0][at], first, length) for item, at, first, length in segments)
        )
        oldest, written = self.position[0], {segment.item for segment in segments}
        for item in list(self._unfinished):
            if item < oldest or (item > oldest and item in written):
                del self._unfinished[item]
        return cuts

    def _sizes(self, item: int) -> Sequence[int] | None:
        """Returns the sizes of an item's nonempty documents in targets, None past `end`; reads the item if needed."""
        if item not in self._unfinished:
            ordinal = self._first + item * self._stride
            if ordinal >= self._end:
                return None
            documents = [document for document in self._items(ordinal) if len(document.ids) > 1]
            self._empty_items = 0 if documents else self._empty_items + 1
            if self._empty_items > MAX_EMPTY_DOCUMENTS and self._end == inf:
                raise UserError(
                    f"the last {self._empty_items:,} documents that a row read have no text: the data have ended, or "
                    "their reader no longer works"
                )
            self._unfinished[item] = documents, tuple(len(document.ids) - 1 for document in documents)
        return self._unfinished[item][1]


class SourcePacker:
    """Fills this host's rows from one source. Threads may fill rows of different packing streams at once."""

    name = ""  # the source's name in a mixture

    def fill(self, batch: RowArrays, row: int, ordinal: int, place: int) -> Truncation:
        """Fills row `row`, still padding, with row `ordinal` of the source or the next row of the stream at `place`."""
        raise NotImplementedError

    def position(self, place: int) -> tuple[int, int]:
        """Returns the position of the packing stream at index `place`; zeros if the source does not need one."""
        return 0, 0

    def saved(self) -> dict[str, Any] | None:
        """Returns the state from which a `StreamSource` resumes after the rows so far, as JSON; None for others."""
        return None

    def close(self) -> None:
        """Drops documents being read ahead; rows may still be filled afterwards."""
