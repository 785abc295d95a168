"""A part of the training data that is kept for evaluation."""

import numpy as np

from src.data import order
from src.data.open import Fingerprint, Item, RowSource, Source
from src.data.packing import Document
from src.errors import UserError


class Part:
    """Some items of another source.

    Args:
        source: the whole.
        items: the numbers of its items that belong to the part, ascending.
        name: tells the part from the source's other parts.
    """

    def __init__(self, source: Source, items: np.ndarray | range, name: str) -> None:
        self._source = source
        self._items = items
        self._name = name

    def __len__(self) -> int:
        """How many items there are."""
        return len(self._items)

    def __getitem__(self, i: int) -> Item:
        """Item `i` of the part."""
        return self._source[int(self._items[i])]

    def document_keys(self) -> np.ndarray | None:
        """uint64 [items]: the source's keys, where it lists them."""
        keys = self._source.document_keys()
        return None if keys is None else keys[self._items]

    def group_sizes(self) -> np.ndarray | None:
        """Of the source's groups, as far as they are in the part: items one after the other, where there are groups."""
        sizes = self._source.group_sizes()
        if sizes is None:
            return None
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return np.diff(np.clip(bounds, self._items[0], self._items[-1] + 1))

    def fingerprint(self) -> Fingerprint:
        """The source's, and which part it is."""
        return {**self._source.fingerprint(), "part": self._name}


class RowPart:
    """Some rows of another source of rows, one after the other.

    Args:
        source: the whole.
        rows: the numbers of its rows that belong to the part.
        name: tells the part from the source's other part.
    """

    def __init__(self, source: RowSource, rows: range, name: str) -> None:
        self.row_count = len(rows)
        self._source = source
        self._rows = rows
        self._name = name

    def row(self, i: int) -> list[Document]:
        """Row `i` of the part."""
        return self._source.row(self._rows[i])

    def fingerprint(self) -> Fingerprint:
        """The source's, and which part it is."""
        return {**self._source.fingerprint(), "part": self._name}


def split(source: Source | RowSource, fraction: float) -> tuple[Source | RowSource, Source | RowSource]:
    """Parts a source into items to train on and items held out; of several documents, each with all its pieces.

    Of files whose documents are known one by one, a document is held out where its hash falls in the lowest `fraction`
    of all values, so that documents added to the source later move none. However few there are, the lowest hash is held
    out and the highest is not. Of other sources, and of the pieces of a single document, the last items are held out,
    as many as the fraction says, and at least one.

    Returns:
        The part to train on, the part held out.

    Raises:
        UserError: there is only one document, in one piece.
    """
    train, held_out = f"all but {fraction} of the documents", f"{fraction} of the documents"
    if isinstance(source, RowSource):
        if source.row_count is None:
            raise UserError("rows without an end have no part to hold out: name data with eval_dataset_path=PATH")
        kept = _kept(source.row_count, fraction)
        return RowPart(source, range(kept), train), RowPart(source, range(kept, source.row_count), held_out)
    keys = source.document_keys()
    if keys is None:
        kept = _kept(len(source), fraction)
        return Part(source, range(kept), train), Part(source, range(kept, len(source)), held_out)
    keys = order.mix64(keys)
    if keys.min() == keys.max():
        kept, train, held_out = _kept(len(keys), fraction), "all but the end of the document", "the document's end"
        return Part(source, np.arange(kept), train), Part(source, np.arange(kept, len(keys)), held_out)
    mask = ((keys < int(fraction * 2**64)) | (keys == keys.min())) & (keys != keys.max())
    return Part(source, np.flatnonzero(~mask), train), Part(source, np.flatnonzero(mask), held_out)


def _kept(count: int, fraction: float) -> int:
    """How many of so many items are trained on."""
    if count < 2:
        raise _nothing_to_hold_out()
    return count - min(max(int(fraction * count), 1), count - 1)


def _nothing_to_hold_out() -> UserError:
    return UserError(
        "nothing can be held out of training data that are one document in one piece: name other data with "
        "eval_dataset_path=PATH, or turn evaluation off with eval_interval=-1"
    )
