"""Holds a part of the training data out for evaluation."""

import numpy as np

from src.data import order
from src.data.types import Document, Fingerprint, Item, RowSource, Source
from src.errors import UserError


class Subset(Source):
    """Selects some items of another source.

    Args:
        source: the whole.
        items: the numbers of those items, ascending.
        name: tells the subset from the source's other ones.
    """

    def __init__(self, source: Source, items: np.ndarray | range, name: str) -> None:
        self._source = source
        self._items = items
        self._name = name

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> Item:
        return self._source[int(self._items[i])]

    def document_keys(self) -> np.ndarray | None:
        keys = self._source.document_keys()
        return None if keys is None else keys[self._items]

    def group_sizes(self) -> np.ndarray | None:
        sizes = self._source.group_sizes()
        if sizes is None:
            return None
        # Where there are groups the items are consecutive, so the subset has whole groups but for its first and last.
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return np.diff(np.clip(bounds, self._items[0], self._items[-1] + 1))

    def fingerprint(self) -> Fingerprint:
        return {**self._source.fingerprint(), "part": self._name}


class RowSubset(RowSource):
    """Selects consecutive rows of another source of rows.

    Args:
        source: the whole.
        rows: the numbers of those rows.
        name: tells the subset from the source's other ones.
    """

    def __init__(self, source: RowSource, rows: range, name: str) -> None:
        self.row_count = len(rows)
        self._source = source
        self._rows = rows
        self._name = name

    def row(self, i: int) -> list[Document]:
        return self._source.row(self._rows[i])

    def fingerprint(self) -> Fingerprint:
        return {**self._source.fingerprint(), "part": self._name}


def train_validation_split(
    source: Source | RowSource, fraction: float
) -> tuple[Source | RowSource, Source | RowSource]:
    """Splits a source into items to train on and items held out; the pieces of a document stay together.

    Of files whose documents are known one by one, a document is held out where its hash falls in the lowest `fraction`
    of all values, so that documents added to the source later move none. However few there are, the lowest hash is held
    out and the highest is not. Of other sources, and of the pieces of a single document, the last items are held out:
    that fraction of them, and at least one.

    Returns:
        The subset to train on, the subset held out.

    Raises:
        UserError: there is only one document, in one piece.
    """
    train, held_out = f"all but {fraction} of the documents", f"{fraction} of the documents"
    if isinstance(source, RowSource):
        if source.row_count is None:
            raise UserError("rows without an end have no part to hold out: name data with eval_dataset_path=PATH")
        count = _train_count(source.row_count, fraction)
        return RowSubset(source, range(count), train), RowSubset(source, range(count, source.row_count), held_out)
    keys = source.document_keys()
    if keys is None:
        count = _train_count(len(source), fraction)
        return Subset(source, range(count), train), Subset(source, range(count, len(source)), held_out)
    keys = order.mix64(keys)
    if keys.min() == keys.max():
        count = _train_count(len(keys), fraction)
        train, held_out = "all but the end of the document", "the document's end"
        return Subset(source, np.arange(count), train), Subset(source, np.arange(count, len(keys)), held_out)
    mask = ((keys < int(fraction * 2**64)) | (keys == keys.min())) & (keys != keys.max())
    return Subset(source, np.flatnonzero(~mask), train), Subset(source, np.flatnonzero(mask), held_out)


def _train_count(count: int, fraction: float) -> int:
    if count < 2:
        raise _nothing_to_hold_out()
    return count - min(max(int(fraction * count), 1), count - 1)


def _nothing_to_hold_out() -> UserError:
    return UserError(
        "nothing can be held out of training data that are one document in one piece: name other data with "
        "eval_dataset_path=PATH, or turn evaluation off with eval_interval=-1"
    )
