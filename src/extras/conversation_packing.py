"""Packs conversations without cutting any that fits into a row: the layout `best_fit`."""

import bisect
from collections.abc import Sequence

from src.data.packing import PLACED_BITS, Position, Segment, Sizes, remaining
from src.system.errors import UserError

WINDOW = PLACED_BITS + 1  # items to choose from: a position has one bit for each of them except the oldest
_MAX_ROWS = (1 << 32 - WINDOW) - 1  # together with the window's bits, this fills the 31 bits of a positive int32


def best_fit(sizes_of: Sizes, position: Position, length: int) -> tuple[list[Segment], Position]:
    """Packs one row of `length` targets from `position` on, without cutting any item that fits into a row.

    Returns the row's segments, none if no item is left, and the next row's position. A row begins with the oldest item
    that is not placed yet. It then repeatedly takes the longest item that fits, among the `WINDOW` items from the
    oldest on. If an item is longer than a row, each row takes the documents that fit; a document longer than a row is
    cut at the row's end.

    The second number of a position counts the targets taken from the oldest item, as in the other layouts. If a later
    item is placed, it is -(rows << PLACED_BITS | placed) instead: `rows` is the number of rows that have documents of
    the oldest item, and bit i of `placed` is set if item i + 1 after it is placed. Raises UserError if an item takes
    more rows than a position can count.
    """
    item, offset, placed = position[0], max(position[1], 0), 0  # bit i of placed: item i after the oldest is placed
    if position[1] < 0:
        rows, placed = divmod(-position[1], 1 << PLACED_BITS)
        placed <<= 1
        ends = _row_ends(sizes_of(item) or (), length) if rows else [0]
        offset = ends[min(rows, len(ends) - 1)]
    item, placed = _oldest(sizes_of, item, placed)
    if (sizes := sizes_of(item)) is None:
        return [], (item, 0)
    segments = _leading(item, sizes, offset, length)
    free = length - sum(segment.length for segment in segments)
    offset += length - free
    if offset >= sum(sizes):
        offset, placed = 0, placed | 1
    item, placed = _oldest(sizes_of, item, placed)
    while free:
        longest, best, chosen = 0, 0, ()
        for ahead in range(WINDOW):
            if placed >> ahead & 1:
                continue
            if (sizes := sizes_of(item + ahead)) is None:
                break
            if longest < (size := sum(sizes)) <= free:
                longest, best, chosen = size, ahead, sizes
        if not longest:
            break
        segments += [Segment(item + best, document, 0, size) for document, size in enumerate(chosen)]
        free -= longest
        item, placed = _oldest(sizes_of, item, placed | 1 << best)
    if not placed:
        return segments, (item, offset)
    rows = bisect.bisect_right(_row_ends(sizes_of(item) or (), length), offset) - 1
    if rows > _MAX_ROWS:
        raise UserError(
            f"a conversation takes more than {_MAX_ROWS:,} rows of max_target_length={length}: raise "
            "max_target_length, or set packing=false"
        )
    return segments, (item, -(rows << PLACED_BITS | placed >> 1))


def _oldest(sizes_of: Sizes, item: int, placed: int) -> tuple[int, int]:
    """Finds the first item from `item` on that still has targets to place, and shifts the placed bits to it."""
    while placed & 1 or sizes_of(item) == ():
        item, placed = item + 1, placed >> 1
    return item, placed


def _leading(item: int, sizes: Sequence[int], offset: int, free: int) -> list[Segment]:
    """Returns the segments that begin a row of `free` targets: an item's documents, without its first `offset` targets.

    Cuts a document that is longer than the row.
    """
    segments: list[Segment] = []
    for document, first, rest in remaining(sizes, offset):
        if rest > free and segments:
            break
        segments.append(Segment(item, document, first, min(rest, free)))
        free -= segments[-1].length
    return segments


def _row_ends(sizes: Sequence[int], length: int) -> list[int]:
    """Lists how many of an item's targets come before each row that begins with it, and last, how many it has."""
    ends = [0]
    while ends[-1] < sum(sizes):
        ends.append(ends[-1] + sum(segment.length for segment in _leading(0, sizes, ends[-1], length)))
    return ends
