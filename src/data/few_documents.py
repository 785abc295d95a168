"""Spreads the rows of a batch over few documents, so that they do not all begin at the same places."""

from src.data.packing import Items
from src.data.types import Document, InputSpec


def spread(read: Items, count: int, streams: int, inputs: InputSpec) -> Items:
    """Starts streams at different offsets within documents, if there are fewer documents, `count`, than streams.

    The ordinals that streams read together belong to several epochs: each epoch starts a document at its own offset, at
    even distances, and reads the part before the offset last. Documents that fit into a row are not split, and without
    packing offsets are whole rows.
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
