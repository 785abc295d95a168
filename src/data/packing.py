"""Lanes: how documents become rows, so that a run can stop after any row and go on exactly there.

Row j of every batch is the work of lane j, which depends on no other lane: hosts share nothing, and any number of them
gives the same batches. A document of n ids gives n - 1 (token, target) pairs, `ids[:-1]` and `ids[1:]`. Each pair of a
lane's documents comes once, whatever the cuts, so each transition is predicted once. Whether a pair counts in the loss
goes with it. A layout plans the rows: texts are laid end to end and cut at T, conversations that fit a row are not cut.

T: tokens per row.  B: rows of a batch, over all hosts.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from src.errors import UserError

Batch = dict[str, np.ndarray]

MAX_EMPTY_DOCUMENTS = 10_000  # one after the other, before it is an error
Cuts = tuple[bool, bool]
"""Whether the first document of a row began in an earlier one, and whether the last is cut at the row's end."""


class Document(NamedTuple):
    """What a lane lays into rows.

    ids: int32 [n], maybe none.
    learned: bool [n], which of the ids count in the loss as targets; None: all of them.
    """

    ids: np.ndarray
    learned: np.ndarray | None = None


Items = Callable[[int], Sequence[Document]]
"""Ordinal (which item of the endless stream over all epochs) to its documents: one, but for some conversations."""

WINDOW = 20  # items that `whole` chooses from
_MAX_ROWS = (1 << 32 - WINDOW) - 1  # with the window's bits they fill the 31 of a positive int32


def empty_batch(rows: int, length: int) -> Batch:
    """Rows of padding, to be filled by lanes.

    Returns:
        tokens: int32 [rows, T], inputs.
        targets: int32 [rows, T], the id that follows each token in its document.
        segment_ids: int32 [rows, T], 1 and up for the documents of a row, 0 for padding.
        positions: int32 [rows, T], from 0 in each segment.
        loss_mask: float32 [rows, T], 1 where the target counts in the loss; 0 on padding.
    """
    batch = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    return batch | {"loss_mask": np.zeros((rows, length), np.float32)}


def lay(batch: Batch, row: int, start: int, segment: int, document: Document, first: int, pairs: int) -> None:
    """Writes `pairs` pairs of a document, from pair `first` on, into a row, from `start` on, as segment `segment`."""
    here = (row, slice(start, start + pairs))
    targets = slice(first + 1, first + 1 + pairs)
    batch["tokens"][here] = document.ids[first : first + pairs]
    batch["targets"][here] = document.ids[targets]
    batch["segment_ids"][here] = segment
    batch["positions"][here] = np.arange(pairs)
    batch["loss_mask"][here] = 1 if document.learned is None else document.learned[targets]


def fill_row(batch: Batch, row: int, documents: Iterable[Document]) -> Cuts:
    """Writes documents into a row that is still padding, as much of them as it has room for."""
    filled, is_cut = 0, False
    for segment, document in enumerate(documents, start=1):
        pairs = min(len(document.ids) - 1, batch["tokens"].shape[1] - filled)
        lay(batch, row, filled, segment, document, 0, pairs)
        filled += pairs
        is_cut |= pairs < len(document.ids) - 1
    return False, is_cut


Piece = tuple[int, int, int, int]
"""A segment of a row: (item, which of its documents, first pair, pairs)."""

Position = tuple[int, int]
"""Where a lane goes on: (items finished, pairs taken of the next one), or as `whole` says."""

Sizes = Callable[[int], Sequence[int] | None]
"""Item k of a lane to the pairs of each of its documents: () where it has none, None past the end."""

Layout = Callable[[Sizes, Position, int], tuple[list[Piece], Position]]
"""Plans the next row of `length` tokens: its pieces, none past the end, and the position after it."""


def end_to_end(sizes_of: Sizes, position: Position, length: int) -> tuple[list[Piece], Position]:
    """Lays documents end to end. What a row has no room for begins the next one."""
    return _cut(sizes_of, position, length, length)


def one_a_row(sizes_of: Sizes, position: Position, length: int) -> tuple[list[Piece], Position]:
    """Gives each document a row. What the row has no room for begins the next one."""
    return _cut(sizes_of, position, length, 1)


def _cut(sizes_of: Sizes, position: Position, length: int, most: int) -> tuple[list[Piece], Position]:
    """Fills a row with at most so many pieces."""
    item, offset = position[0], max(position[1], 0)  # below 0: a position of `whole`, whose placed items come again
    pieces: list[Piece] = []
    room = length
    while room and len(pieces) < most and (sizes := sizes_of(item)) is not None:
        for document, first, rest in _remaining(sizes, offset):
            pairs = rest if rest < room else room
            pieces.append((item, document, first, pairs))
            offset += pairs
            room -= pairs
            if not room or len(pieces) == most:
                break
        if offset >= sum(sizes):
            item, offset = item + 1, 0
    return pieces, (item, offset)


def whole(sizes_of: Sizes, position: Position, length: int) -> tuple[list[Piece], Position]:
    """Packs items so that none is cut that fits a row.

    A row begins with the oldest item that is not placed yet. Then, again and again, it takes the longest that fits of
    the `WINDOW` items from the oldest on. Of an item longer than a row each row has as many documents as fit, and a
    document longer than a row is cut at the row's end.

    The second number of a position is the pairs taken of the oldest item, as of the other layouts; or, where a later
    item is placed, -(rows << WINDOW - 1 | placed): the full rows taken of the oldest item, and bit i says whether the
    item i + 1 after it is placed.

    Raises:
        UserError: an item has more rows than a position can count.
    """
    item, offset, placed = _unpack(sizes_of, position, length)
    item, placed = _oldest(sizes_of, item, placed)
    if (sizes := sizes_of(item)) is None:
        return [], (item, 0)
    pieces = _leading(item, sizes, offset, length)
    room = length - sum(pairs for *_, pairs in pieces)
    offset += length - room
    if offset >= sum(sizes):
        offset, placed = 0, placed | 1
    item, placed = _oldest(sizes_of, item, placed)
    while room:
        longest, best = 0, 0
        for ahead in range(WINDOW):
            if placed >> ahead & 1:
                continue
            if (sizes := sizes_of(item + ahead)) is None:
                break
            if longest < (size := sum(sizes)) <= room:
                longest, best = size, ahead
        if not longest:
            break
        pieces += [(item + best, document, 0, pairs) for document, pairs in enumerate(sizes_of(item + best))]
        room -= longest
        item, placed = _oldest(sizes_of, item, placed | 1 << best)
    if not placed:
        return pieces, (item, offset)
    rows = bisect.bisect_right(_row_ends(sizes_of(item) or (), length), offset) - 1
    if rows > _MAX_ROWS:
        raise UserError(
            f"a conversation takes more than {_MAX_ROWS:,} rows of max_target_length={length}: raise "
            "max_target_length, or set packing=false"
        )
    return pieces, (item, -(rows << WINDOW - 1 | placed >> 1))


def _unpack(sizes_of: Sizes, position: Position, length: int) -> tuple[int, int, int]:
    """Returns (oldest item, pairs taken of it, placed items: bit i for the item i after the oldest)."""
    item, state = position
    if state >= 0:
        return item, state, 0
    rows, placed = divmod(-state, 1 << WINDOW - 1)
    ends = _row_ends(sizes_of(item) or (), length) if rows else [0]
    return item, ends[min(rows, len(ends) - 1)], placed << 1


def _oldest(sizes_of: Sizes, item: int, placed: int) -> tuple[int, int]:
    """Returns the first item from `item` on with something left to place, and the placed bits from it on."""
    while placed & 1 or sizes_of(item) == ():
        item, placed = item + 1, placed >> 1
    return item, placed


def _leading(item: int, sizes: Sequence[int], offset: int, length: int) -> list[Piece]:
    """Returns the pieces of an item after `offset` pairs that begin a row; a document too long for it is cut."""
    pieces: list[Piece] = []
    room = length
    for document, first, rest in _remaining(sizes, offset):
        if rest > room and pieces:
            break
        pieces.append((item, document, first, min(rest, room)))
        room -= min(rest, room)
    return pieces


def _row_ends(sizes: Sequence[int], length: int) -> list[int]:
    """Returns how many pairs of an item are taken before each of its rows, and in all."""
    ends = [0]
    while ends[-1] < sum(sizes):
        ends.append(ends[-1] + sum(pairs for *_, pairs in _leading(0, sizes, ends[-1], length)))
    return ends


def _remaining(sizes: Sequence[int], offset: int) -> list[tuple[int, int, int]]:
    """Returns (document, first pair, pairs) for each document that an item has left after `offset` pairs."""
    if len(sizes) == 1:  # which is nearly always so
        # Nothing where it is shorter than what was taken of it: after an accepted change it is another document.
        return [(0, offset, sizes[0] - offset)] if offset < sizes[0] else []
    starts = itertools.accumulate(sizes, initial=0)
    return [
        (document, max(offset - start, 0), size - max(offset - start, 0))
        for document, (start, size) in enumerate(zip(starts, sizes, strict=False))
        if offset < start + size
    ]


class Lane:
    """The stream of items with ordinals `first`, `first + stride`, ... in rows.

    Args:
        items: the documents of an ordinal.
        first: the lane's number, j.
        stride: the number of lanes, B.
        layout: how documents become rows.
        position: where to go on, as `Lane.position` was.
        end: ordinals from here on don't exist; once past them the lane's rows are padding.

    Attributes:
        position: where it goes on after the rows so far.
    """

    def __init__(
        self,
        items: Items,
        first: int,
        stride: int,
        layout: Layout,
        position: Sequence[int] = (0, 0),
        end: float = math.inf,
    ) -> None:
        self._items = items
        self._first = int(first)  # numpy's ints, which rows and positions come in, overflow in the order's hash
        self._stride = stride
        self._layout = layout
        self._end = end
        self._read: dict[int, tuple[Sequence[Document], tuple[int, ...]]] = {}  # items not finished, with their pairs
        self._empty = 0  # items without any, one after the other
        item, state = position
        self.position: Position = (int(item), int(state))

    def fill(self, batch: Batch, row: int) -> Cuts:
        """Writes the lane's next row into `batch`, whose row is still padding."""
        self._empty = 0
        pieces, position = self._layout(self._sizes, self.position, batch["tokens"].shape[1])
        filled, goes_on, is_cut = 0, False, False
        for segment, (item, document, first, pairs) in enumerate(pieces, start=1):
            documents, sizes = self._read[item]
            lay(batch, row, filled, segment, documents[document], first, pairs)
            filled += pairs
            goes_on |= first > 0
            is_cut |= first + pairs < sizes[document]
        for item in {piece[0] for piece in pieces} - {position[0]}:
            del self._read[item]
        while (item := next(iter(self._read), position[0])) < position[0]:
            del self._read[item]  # which has no document
        self.position = position
        return goes_on, is_cut

    def _sizes(self, item: int) -> Sequence[int] | None:
        """Returns the pairs of each of an item's documents that has any; None past the end."""
        if item not in self._read:
            ordinal = self._first + item * self._stride
            if ordinal >= self._end:
                return None
            documents = self._items(ordinal)
            sizes = tuple([len(document.ids) - 1 for document in documents])
            if min(sizes, default=0) < 1:
                documents = [document for document in documents if len(document.ids) > 1]
                sizes = tuple(size for size in sizes if size > 0)
            self._empty = 0 if documents else self._empty + 1
            if self._empty > MAX_EMPTY_DOCUMENTS and self._end == math.inf:
                raise UserError(
                    f"the last {self._empty:,} documents that a row read have no text: the data have come to an end, "
                    "or what reads them no longer does"
                )
            self._read[item] = documents, sizes
        return self._read[item][1]


def rows_needed(items: Iterable[Sequence[int]], length: int, layout: Layout) -> int:
    """Counts the rows of T that a lane fills with items whose documents have these numbers of ids."""
    sizes = [tuple(size - 1 for size in item if size > 1) for item in items]
    position, rows = (0, 0), 0
    while True:
        pieces, position = layout(lambda item: sizes[item] if item < len(sizes) else None, position, length)
        if not pieces:
            return rows
        rows += 1


def documents_taken(positions: np.ndarray) -> np.ndarray:
    """Counts the items that each lane has finished: int64 [B], from positions int32 [B, 2]."""
    placed = -np.minimum(positions[:, 1].astype(np.int64), 0) & (1 << WINDOW - 1) - 1
    return positions[:, 0].astype(np.int64) + np.bitwise_count(placed)


def after_documents(positions: np.ndarray, rows: int) -> np.ndarray:
    """Where another number of lanes goes on after as many documents as these have taken.

    What some lanes were ahead of the others comes again, and what they were behind does not come.

    Args:
        positions: int32 [B, 2], of each lane.
        rows: how many lanes there are to be.

    Returns:
        int32 [rows, 2].
    """
    taken = documents_taken(positions).sum()
    # Lane j has the documents j, j + rows, ...: of the first n it has ceil((n - j) / rows).
    of_lane = np.maximum(-((np.arange(rows) - taken) // rows), 0)
    return np.stack([of_lane, np.zeros_like(of_lane)], axis=1).astype(np.int32)
