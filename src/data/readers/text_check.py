"""Checks at the start of a run that files are text, before it reads all of them."""

import time
from typing import Any

import numpy as np

from src.data.readers import files
from src.data.readers.files import is_jsonl
from src.data.readers.pieces import count_pieces
from src.data.readers.records import Index
from src.system.errors import say

_CHECKED_SECONDS, _BLOCK_BYTES = 5.0, 1 << 18  # time limit, and bytes per read


def check(source: Any, setting: str, is_remote: bool) -> None:
    """Reads the first and the last piece of each file, then blocks in a random order until the time is up.

    `source` is a `TextSource`; for remote files, where each read is a request, only the first file's first piece is
    read. Raises UserError if something is not text, or a line is not JSON with a document.
    """
    documents = source.files
    first_documents = np.unique(documents.file, return_index=True)[1]
    firsts = source.index.starts[[*first_documents, len(documents)]]
    if is_remote:
        source[int(firsts[0])]
        return
    for item in np.unique([firsts[:-1], firsts[1:] - 1]):
        source[int(item)]
    blocks = Index(count_pieces(np.array(documents.sizes), _BLOCK_BYTES))
    deadline = time.monotonic() + _CHECKED_SECONDS
    for checked, block in enumerate(np.random.default_rng(0).permutation(len(blocks))):
        if time.monotonic() > deadline:
            say([f"{setting}: {100 * checked // len(blocks)}% is checked at the start, the rest when it is read"])
            return
        _check_block(source, *blocks.find(block))


def _check_block(source: Any, number: int, block: int) -> None:
    """Checks the lines that begin in a block of a .jsonl file, or that block of a text."""
    documents = source.files
    file = documents.paths[number]
    if not is_jsonl(file):
        source.read_text(file, block, documents.sizes[number], _BLOCK_BYTES)
        return
    lines = documents.extent[slice(*np.searchsorted(documents.file, [number, number + 1]))]
    begun = slice(*np.searchsorted(lines[:, 0], [block * _BLOCK_BYTES, (block + 1) * _BLOCK_BYTES]))
    lines = lines[begun].tolist()
    data = files.read(file, lines[0][0], lines[-1][1]) if lines else b""
    for start, stop in lines:
        source.parse_line(data[start - lines[0][0] : stop - lines[0][0]], file, start)
