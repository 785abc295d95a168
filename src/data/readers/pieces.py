"""Cuts long texts into pieces, so that no document fills a row of the batch for thousands of steps."""

from collections.abc import Callable
from typing import Any

_CUT_WINDOW = 1 / 8  # fraction of a piece, before its end, in which a cut moves back to a line end


def count_pieces(sizes: Any, max_bytes: int) -> Any:
    """Counts the pieces of documents of these sizes in bytes, an int or an array."""
    return -(-sizes // (max_bytes - int(_CUT_WINDOW * max_bytes)))


def read_piece(number: int, size: int, max_bytes: int, read: Callable[[int, int], bytes]) -> bytes:
    """Reads piece `number` of a document of `size` bytes by `read(begin, end)`; empty past the last piece."""
    # Cuts depend only on the document and are found from the bytes around them, so each piece can be read separately.
    count, window = count_pieces(size, max_bytes), int(_CUT_WINDOW * max_bytes)
    if number >= count:
        return b""
    begin, end = number * size // count, (number + 1) * size // count
    offset = max(begin - window, 0)
    data = read(offset, end + 1)
    first = _cut(data, begin - offset, window) if number > 0 else 0
    last = _cut(data, end - offset, window) if number + 1 < count else size - offset
    return data[first:last]


def _cut(data: bytes, at: int, window: int) -> int:
    """Moves a cut back from `at` to the last line end in the window before it, else to the start of a character."""
    line_end = data.rfind(b"\n", max(at - window, 0), at)
    if line_end >= 0:
        return line_end + 1
    while at > 0 and data[at] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        at -= 1
    return at
