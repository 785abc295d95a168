"""Lanes: how documents become rows, so that a run can stop after any row and go on exactly there.

Row j of every batch is the work of lane j, which depends on no other lane: hosts share nothing, and any number of them
gives the same batches. A document of n ids gives n - 1 (token, target) pairs, `ids[:-1]` and `ids[1:]`. A lane lays the
pairs of its documents end to end and cuts at T, so each transition is predicted once, whatever the cuts. Whether a pair
counts in the loss goes with it.

T: tokens per row.  B: rows of a batch, over all hosts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from src.errors import UserError

Batch = dict[str, np.ndarray]

MAX_EMPTY_DOCUMENTS = 10_000  # one after the other, before it is an error


class Document(NamedTuple):
    """What a lane lays into rows.

    ids: int32 [n], maybe none.
    learned: bool [n], which of the ids count in the loss as targets; None: all of them.
    """

    ids: np.ndarray
    learned: np.ndarray | None = None


Documents = Callable[[int], Document]
"""Ordinal (which document of the endless stream over all epochs) to the document."""


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


def fill_row(batch: Batch, row: int, documents: Iterable[Document]) -> None:
    """Writes documents into a row that is still padding and has room for all their pairs."""
    filled = 0
    for segment, document in enumerate(documents, start=1):
        pairs = len(document.ids) - 1
        lay(batch, row, filled, segment, document, 0, pairs)
        filled += pairs


class Lane:
    """The stream of documents with ordinals `first`, `first + stride`, ... cut into rows.

    Args:
        documents: the document of an ordinal.
        first: the lane's number, j.
        stride: the number of lanes, B.
        packing: whether a row may hold more than one document.
        position: where to go on, as the property of that name gave it.
        end: ordinals from here on don't exist; once past them the lane's rows are padding.
    """

    def __init__(
        self,
        documents: Documents,
        first: int,
        stride: int,
        packing: bool,
        position: Sequence[int] = (0, 0),
        end: float = math.inf,
    ) -> None:
        self._documents = documents
        self._first = int(first)  # numpy's ints, which rows and positions come in, overflow in the order's hash
        self._stride = stride
        self._packing = packing
        self._end = end
        self._taken, self._offset = (int(part) for part in position)
        self._document: Document | None = None  # at the position, once read

    @property
    def position(self) -> tuple[int, int]:
        """(documents taken, pairs taken of the next one)."""
        return self._taken, self._offset

    def fill(self, batch: Batch, row: int) -> None:
        """Writes the lane's next row into `batch`, whose row is still padding.

        With packing, the row takes documents until it is full. Without, it takes one document, or as much of it as
        fits. Either way what is left of a document begins the lane's next row, with positions from 0 again.
        """
        length = batch["tokens"].shape[1]
        filled = segment = empty = 0
        while filled < length and (document := self._current()) is not None:
            all_pairs = max(len(document.ids) - 1, 0)
            pairs = min(all_pairs - self._offset, length - filled)
            empty = 0 if all_pairs else empty + 1
            if empty > MAX_EMPTY_DOCUMENTS and self._end == math.inf:
                raise UserError(
                    f"the last {empty:,} documents that a row read have no text: the data have come to an end, or what "
                    "reads them no longer does"
                )
            if pairs > 0:
                segment += 1
                lay(batch, row, filled, segment, document, self._offset, pairs)
                self._offset += pairs
                filled += pairs
            if self._offset >= all_pairs:
                self._taken, self._offset, self._document = self._taken + 1, 0, None
            if filled and not self._packing:
                return

    def _current(self) -> Document | None:
        """The document at the position; None past the end."""
        ordinal = self._first + self._taken * self._stride
        if ordinal >= self._end:
            return None
        if self._document is None:
            self._document = self._documents(ordinal)
        return self._document


def rows_needed(document_sizes: Iterable[int], length: int, packing: bool) -> int:
    """How many rows of T a lane fills with documents of these sizes, in ids: what `Lane.fill` does, only counted."""
    pairs = [max(size - 1, 0) for size in document_sizes]
    if packing:
        return math.ceil(sum(pairs) / length)
    return sum(math.ceil(count / length) for count in pairs)


def after_documents(positions: np.ndarray, rows: int) -> np.ndarray:
    """Where another number of lanes goes on after as many documents as these have taken.

    What some lanes were ahead of the others comes again, and what they were behind does not come.

    Args:
        positions: int32 [B, 2], of each lane.
        rows: how many lanes there are to be.

    Returns:
        int32 [rows, 2].
    """
    taken = positions[:, 0].sum(dtype=np.int64)
    # Lane j has the documents j, j + rows, ...: of the first n it has ceil((n - j) / rows).
    of_lane = np.maximum(-((np.arange(rows) - taken) // rows), 0)
    return np.stack([of_lane, np.zeros_like(of_lane)], axis=1).astype(np.int32)
