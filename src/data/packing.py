"""Packs documents into rows, so that a run can stop after any row and resume exactly there.

Row j of every batch is filled by packing stream j (in a ramp, row n of the run by stream n mod B), which depends on no
other stream: hosts share nothing, and any number of them gives the same batches. A document of n ids has n - 1 inputs,
`ids[:-1]`, with the targets `ids[1:]`; sizes, offsets and the length of a row all count targets. Each target of a
stream's documents comes exactly once, wherever rows are cut. A layout plans the rows: texts are concatenated and cut at
T (`best_fit.py` is for conversations).

T: tokens per row.  B: rows of a batch, over all hosts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from src.data.types import BATCH_ARRAYS, NOT_TEXT, Document, RowArrays
from src.system.errors import UserError

MAX_EMPTY_DOCUMENTS = 10_000  # in succession, before it is an error

# Maps an ordinal (an item's place in the endless stream over all epochs) to the item's documents: one, or for some
# conversations one for each turn of the assistant.
Items = Callable[[int], Sequence[Document]]

# Maps item k of a stream to the number of targets of each of its documents: () if it has none, None past the end.
Sizes = Callable[[int], Sequence[int] | None]

# Where a stream resumes: (items finished, targets taken of the next one); `best_fit` has another second one.
Position = tuple[int, int]


class Segment(NamedTuple):
    """Names a part of a row: `length` targets of one of an item's documents, from target `first` on."""

    item: int
    document: int
    first: int
    length: int


# Plans the next row of `length` tokens: its segments (none past the end), and the position after it.
RowLayout = Callable[[Sizes, Position, int], tuple[list[Segment], Position]]


class Truncation(NamedTuple):
    """Tells at which ends a row's documents are cut."""

    start: bool  # the first began in an earlier row
    end: bool  # the last continues in a later one


def empty_batch(rows: int, length: int, counts_bytes: bool = False) -> RowArrays:
    """Makes rows of padding: the arrays of `BATCH_ARRAYS`, [rows, T], and `text_bytes` where they are counted."""
    counted = {"text_bytes": np.full((rows, length), NOT_TEXT, np.int32)} if counts_bytes else {}
    return {name: np.zeros((rows, length), dtype) for name, dtype in BATCH_ARRAYS.items()} | counted


def fill_row(batch: RowArrays, row: int, parts: Iterable[tuple[Document, int, int]]) -> Truncation:
    """Writes parts of documents, (document, first target, targets), into a row of padding; what exceeds it is cut."""
    filled, start, end = 0, False, False
    for segment_id, (document, first, length) in enumerate(parts, 1):
        length = min(length, batch["tokens"].shape[1] - filled)
        # Targets `first` to `first + length` of a document are its ids from `first + 1` on, their inputs those before.
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
    """Concatenates documents. What exceeds a row begins the next one."""
    item, offset = position[0], max(position[1], 0)  # below 0: a position of `best_fit`, whose placed items come again
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


def one_per_row(sizes_of: Sizes, position: Position, length: int) -> tuple[list[Segment], Position]:
    """Gives each document a row of its own. What exceeds the row begins the next one."""
    return concatenate(sizes_of, position, length, max_segments=1)


def remaining(sizes: Sequence[int], offset: int) -> Iterator[tuple[int, int, int]]:
    """Yields (document, first target, targets) for each document of an item with any left after `offset` targets."""
    # None may be: an accepted change of data can leave a document shorter than what was taken of it.
    for document, size in enumerate(sizes):
        if offset < size:
            yield document, max(offset, 0), size - max(offset, 0)
        offset -= size


class PackingStream:
    """Packs the items with ordinals `first`, `first + stride`, ... into rows.

    `first` is the stream's number j, `stride` the number of streams B. Ordinals from `end` on don't exist; past them
    the stream's rows are padding. `position` says where it resumes after the rows so far.
    """

    def __init__(
        self, items: Items, first: int, stride: int, layout: RowLayout, position: Position = (0, 0), end: float = inf
    ) -> None:
        self._items, self._stride, self._layout, self._end = items, stride, layout, end
        self._first = int(first)  # numpy's ints, which rows and positions come in, overflow in the order's hash
        self._unfinished: dict[int, tuple[Sequence[Document], tuple[int, ...]]] = {}  # documents of items, their sizes
        self._empty_items = 0  # in succession
        self.position: Position = (int(position[0]), int(position[1]))

    def fill(self, batch: RowArrays, row: int) -> Truncation:
        """Writes the stream's next row into row `row` of `batch`, which is still padding."""
        self._empty_items = 0
        segments, self.position = self._layout(self._sizes, self.position, batch["tokens"].shape[1])
        cuts = fill_row(
            batch, row, ((self._unfinished[item][0][document], *part) for item, document, *part in segments)
        )
        oldest, written = self.position[0], {segment.item for segment in segments}
        for item in [item for item in self._unfinished if item < oldest or (item > oldest and item in written)]:
            del self._unfinished[item]
        return cuts

    def _sizes(self, item: int) -> Sequence[int] | None:
        """Reads an item where it is not read yet, and returns the sizes of its documents that are not empty."""
        if item not in self._unfinished:
            ordinal = self._first + item * self._stride
            if ordinal >= self._end:
                return None
            documents = [document for document in self._items(ordinal) if len(document.ids) > 1]
            self._empty_items = 0 if documents else self._empty_items + 1
            if self._empty_items > MAX_EMPTY_DOCUMENTS and self._end == inf:
                raise UserError(
                    f"the last {self._empty_items:,} documents that a row read have no text: the data have come to an "
                    "end, or what reads them no longer does"
                )
            self._unfinished[item] = documents, tuple([len(document.ids) - 1 for document in documents])
        return self._unfinished[item][1]


class SourcePacker:
    """Fills this host's rows from one source. Threads may fill rows of different packing streams at once."""

    name = ""  # of the source in a mixture

    def fill(self, batch: RowArrays, row: int, ordinal: int, place: int) -> Truncation:
        """Writes row `ordinal` of the source, or the next of the stream at `place`, into row `row`, still padding."""
        raise NotImplementedError

    def position(self, place: int) -> tuple[int, int]:
        """Returns the position of the packing stream at `place`; zeros if the source has no need of one."""
        return 0, 0

    def saved(self) -> dict[str, Any] | None:
        """Returns where a `StreamSource` resumes after the rows so far, as JSON has it; None for other sources."""
        return None

    def close(self) -> None:
        """Drops the documents that are being read ahead; rows may be filled after it."""
