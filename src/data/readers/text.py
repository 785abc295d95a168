"""Texts in files: the pieces of their documents, numbered.

A long text is cut into pieces, so that none owns a row of the batch for thousands of steps. Everything after this
module takes a piece for a document.
"""

import functools

import numpy as np

from src.data.readers import files, text_files
from src.data.types import Source

_LONG_LINE_PIECES, _KEPT_LINES = 8, 4


class TextSource(Source):
    """Text files, each a document, and .jsonl files, each line of which is a JSON object with the document in
    one field: its text, or a list of ids.

    Files are taken in the order of their names. The first piece of every file is read at once, so that an unfit file
    is an error at the start; a later piece is an error when it is reached. Of remote files, where that would be a
    request for each, the first file alone is checked so. The lines of a remote .jsonl file are found by reading all of
    it once.

    Args:
        path: a file, a folder (its files at any depth, but for hidden ones) or a glob, local or remote. Empty: the
            source code of the running Python's standard library.
        max_document_bytes: longer documents are cut into pieces, each a document of its own from there on.
        key: the config key that gave `path`, for messages.
        column: the field of a .jsonl file's objects that has the document.

    Raises:
        UserError: nothing there, no document in it, or a file that is not text.
    """

    def __init__(self, path: str, max_document_bytes: int, key: str = "dataset_path", column: str = "text") -> None:
        self._column = column
        self._max_bytes = max_document_bytes
        self._files = text_files.DocumentFiles(path, key)
        self._read_line = functools.partial(text_files.read_line, column=column)
        # To read a piece takes to parse its line: of long ones some are kept, or each would be parsed once a piece.
        self._read_long_line = functools.lru_cache(maxsize=_KEPT_LINES)(self._read_line)
        pieces = text_files.count_pieces(np.diff(self._files.extent)[:, 0], max_document_bytes)
        self._first_piece = np.cumsum(pieces) - pieces
        self._pieces = int(pieces.sum())
        first_documents = np.unique(self._files.file, return_index=True)[1]
        for document in first_documents[:1] if files.is_remote(path) else first_documents:
            self[int(self._first_piece[document])]

    def __len__(self) -> int:
        """How many pieces there are."""
        return self._pieces

    def __getitem__(self, i: int) -> str | np.ndarray:
        """The text or ids of piece `i`; may be empty, as the length of a document in JSON is known when it is read."""
        document = int(np.searchsorted(self._first_piece, i, side="right")) - 1
        file, start, stop = self._files.locate(document)
        read_line = self._read_long_line if stop - start > _LONG_LINE_PIECES * self._max_bytes else self._read_line
        piece = i - int(self._first_piece[document])
        return text_files.read_piece(file, start, stop, piece, self._max_bytes, read_line)

    def document_keys(self) -> np.ndarray:
        """uint64 [pieces]: a hash of file name and place in the file, which other files don't change."""
        return np.repeat(self._files.keys(), np.diff(self._first_piece, append=self._pieces))

    def fingerprint(self) -> dict[str, str | int]:
        """Of the files, and how they are cut into pieces."""
        own = {"type": "text", "pieces": self._pieces, "max_document_bytes": self._max_bytes}
        column = {} if self._column == "text" else {"column": self._column}  # as in checkpoints that know of no other
        return {**self._files.fingerprint(), **own, **column}
