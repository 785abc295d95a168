"""Holds a part of the training data out for evaluation."""

import numpy as np

from src.data import order
from src.data.types import Document, Fingerprint, Item, RowSource, Source
from src.errors import UserError


class _Subset:
    """Selects items of another source by their numbers, ascending; `name` tells it from the source's other subsets."""

    def __init__(self, source: Source | RowSource, items: np.ndarray | range, name: str) -> None:
        self._source, self._items, self._name = source, items, name
        self.listings = getattr(source, "listings", ())

    def fingerprint(self) -> Fingerprint:
        return {**self._source.fingerprint(), "part": self._name}


class Subset(_Subset, Source):
    """Selects some items of another source."""

    @property
    def is_remote(self) -> bool:
        return self._source.is_remote

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


class RowSubset(_Subset, RowSource):
    """Selects consecutive rows of another source of rows."""

    @property
    def row_count(self) -> int:
        return len(self._items)

    def row(self, i: int) -> list[Document]:
        return self._source.row(self._items[i])


def train_validation_split(
    source: Source | RowSource, fraction: float
) -> tuple[Source | RowSource, Source | RowSource]:
    """Splits a source into items to train on and items held out; the pieces of a document stay together.

    Of files whose documents are known one by one, a document is held out where its hash falls in the lowest `fraction`
    of all values, so that documents added to the source later move none. However few there are, the lowest hash is held
    out and the highest is not. Of other sources, and of the pieces of a single document, the last items are held out:
    that fraction of them, and at least one. Raises UserError if there is one item alone, or no end.
    """
    train, held_out = f"all but {fraction} of the documents", f"{fraction} of the documents"
    has_rows = isinstance(source, RowSource)
    subset, count = (RowSubset, source.row_count) if has_rows else (Subset, len(source))
    if count is None:
        raise UserError("rows without an end have no part to hold out: name data with eval_dataset_path=PATH")
    if count < 2:
        raise UserError(
            "nothing can be held out of training data that are one document in one piece: name other data with "
            "eval_dataset_path=PATH, or turn evaluation off with eval_interval=-1"
        )
    first = count - min(max(int(fraction * count), 1), count - 1)
    items = range(first), range(first, count)
    if not has_rows and (keys := source.document_keys()) is not None:
        keys = order.mix64(keys)
        if keys.min() == keys.max():
            train, held_out = "all but the end of the document", "the document's end"
        else:
            mask = ((keys < int(fraction * 2**64)) | (keys == keys.min())) & (keys != keys.max())
            items = np.flatnonzero(~mask), np.flatnonzero(mask)
    return subset(source, items[0], train), subset(source, items[1], held_out)
