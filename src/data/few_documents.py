"""Spreads the rows of a batch over few documents, so that rows of the same document begin at different offsets."""

from src.data.packing import Items
from src.data.types import Document, InputSpec


def spread(read: Items, count: int, streams: int, inputs: InputSpec) -> Items:
    """Wraps `read` for a source of few documents, so that streams in one document start at different offsets.

    There are `count` documents, fewer than `streams`, so the ordinals that the streams read at a time belong to several
    epochs. Each of these epochs begins a document at its own offset, and reads the part before that offset at the end,
    as a separate document. The offsets are evenly spaced, and without packing multiples of a row. Documents that fit
    into a row are not split. `read` must return exactly one document for each item.
    """
    length = inputs.batch.max_target_length
    unit = 1 if inputs.batch.packing else length

    def documents(ordinal: int) -> list[Document]:
        (document,) = read(ordinal)
        size, begin = len(document.ids) - 1, ordinal - ordinal % streams
        first, epoch, last = (n // count for n in (begin, ordinal, begin + streams - 1))
        place = -(-size // unit) * (epoch - first) // (last - first + 1) * unit if size > length else 0
        slices = (slice(place, None), slice(place + 1)) if place else (slice(None),)
        return [Document._make(None if array is None else array[part] for array in document) for part in slices]

    return documents
