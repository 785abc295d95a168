"""Reads documents in text files and .jsonl files: `dataset_type=text`.

A long text is cut into pieces, so that no document fills a row of the batch for thousands of steps. After this module,
each piece is a document.
"""

import functools
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from src.config.dataset_spec import DatasetSpec
from src.data import order
from src.data.readers import files
from src.data.readers.files import is_jsonl
from src.data.readers.records import Index, Nulls
from src.data.rules import PRESENT_RULES
from src.data.types import Fingerprint, InputSpec, Source
from src.system.errors import UserError, say

_CUT_WINDOW = 1 / 8  # fraction of a piece, before its end, in which a cut moves back to a line end
_KEPT_LINES = 4
_CHECKED_SECONDS, _BLOCK_BYTES = 5.0, 1 << 18  # checks at the start: time limit, and bytes per read
_SOME_FILES = "expected text files, or .jsonl files, that are not empty"


class DocumentFiles:
    """Numbers the documents in files, in the order of file names: each file, or each line of a .jsonl file.

    `path` is a file, a folder (its files at any depth, except hidden ones) or a glob, local or remote; if empty, the
    source code of the running Python's standard library is read. Messages name its config key, `key`. Each .jsonl file
    is read once to find its lines, so a remote one is fetched completely. Raises UserError, with the text `expected`,
    if the files have no documents.
    """

    def __init__(self, path: str, key: str, expected: str = _SOME_FILES, rules: int = PRESENT_RULES) -> None:
        if path:
            from src.data.readers.text_files import list_text_files

            self.listing = list_text_files(path, key, rules)
        else:
            self.listing = standard_library()
        self.paths, self.sizes = self.listing.paths, list(self.listing.sizes.values())
        extents = list(map(_extents, self.paths, self.sizes))
        # int [documents]: the number of each document's file. int64 [documents, 2]: its first byte there, and its end.
        self.file = np.repeat(np.arange(len(extents)), [len(extent) for extent in extents])
        self.extent = np.concatenate([*extents, np.empty((0, 2), np.int64)])
        if not len(self.file):
            raise UserError(f"{key}={path} has no document: {expected}")

    def __len__(self) -> int:
        return len(self.file)

    def locate(self, document: int) -> tuple[str, int, int]:
        """Locates a document: its file, and the bytes at which it begins and ends."""
        start, stop = self.extent[document].tolist()
        return self.paths[self.file[document]], start, stop

    def document_keys(self) -> np.ndarray:
        """Hashes each document's file name and position, uint64 [documents]; other files don't change its hash."""
        names = np.array([order.hash_keys("file", name)[0] for name in self.listing.sizes], np.uint64)
        return order.mix64(names[self.file] + self.extent[:, 0].astype(np.uint64))

    def fingerprint(self) -> Fingerprint:
        """Identifies the files and the number of their documents."""
        return {**self.listing.fingerprint, "documents": len(self)}


class TextSource(Source):
    """Reads text files, each a document, and .jsonl files, with a document in `column` of each line: a text, or ids.

    Opening checks the beginning and the end of every file, then the rest in a random order for five seconds; other
    flaws become errors when they are read. For remote files, where each read is a request, only the beginning of the
    first file is checked. Documents longer than `max_document_bytes` are cut into pieces, which are then treated as
    separate documents. Version 1 of `rules` reads a byte order mark as text. Raises UserError if there are no
    documents, or a file is not text.
    """

    def __init__(
        self,
        path: str,
        max_document_bytes: int,
        key: str = "dataset_path",
        column: str = "text",
        rules: int = PRESENT_RULES,
    ) -> None:
        self._column, self._max_bytes, self._rules = column, max_document_bytes, rules
        self._files = DocumentFiles(path, key, rules=rules)
        self._is_library = not path
        self.listings = [self._files.listing]
        # Reading a piece means parsing its whole line, so the documents of the last few lines are cached.
        self._line = functools.lru_cache(maxsize=_KEPT_LINES)(self._read_line)
        self._index = Index(_count_pieces(np.diff(self._files.extent)[:, 0], max_document_bytes))
        self._nulls = Nulls(f"{key}={path}")
        if path and rules > 1:  # listing the standard library has already read all of it
            self._check(f"{key}={path}", files.is_remote(path))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> str | np.ndarray:
        """Reads piece `i`; it may be empty, as a document in JSON is shorter than its line."""
        document, piece = self._index.find(i)
        file, start, stop = self._files.locate(document)
        if not is_jsonl(file):
            return self._read_text(file, piece, stop, self._max_bytes)
        content = self._line(file, start, stop)
        if isinstance(content, bytes):
            return _piece(piece, len(content), self._max_bytes, lambda begin, end: content[begin:end]).decode()
        count = int(self._index.starts[document + 1] - self._index.starts[document])
        return content[piece * len(content) // count : (piece + 1) * len(content) // count]

    def document_keys(self) -> np.ndarray:
        return np.repeat(self._files.document_keys(), np.diff(self._index.starts))

    def fingerprint(self) -> Fingerprint:
        cuts = {"type": "text", "pieces": len(self), "max_document_bytes": self._max_bytes}
        column = {} if self._column == "text" else {"column": self._column}  # old checkpoints don't name the default
        return {**self._files.fingerprint(), **cuts, **column}

    def _check(self, setting: str, is_remote: bool) -> None:
        """Reads the first and the last piece of each file, then blocks in a random order until the time is up."""
        firsts = self._index.starts[[*np.unique(self._files.file, return_index=True)[1], len(self._files)]]
        for item in firsts[:1] if is_remote else np.unique([firsts[:-1], firsts[1:] - 1]):
            self[int(item)]
        blocks = Index(_count_pieces(np.array(self._files.sizes), _BLOCK_BYTES))
        deadline = time.monotonic() + _CHECKED_SECONDS
        for checked, block in enumerate(np.random.default_rng(0).permutation(0 if is_remote else len(blocks))):
            if time.monotonic() > deadline:
                say([f"{setting}: {100 * checked // len(blocks)}% is checked at the start, the rest when it is read"])
                return
            self._check_block(*blocks.find(block))

    def _check_block(self, number: int, block: int) -> None:
        """Checks the lines that begin in a block of a .jsonl file, or that block of a text."""
        file = self._files.paths[number]
        if not is_jsonl(file):
            self._read_text(file, block, self._files.sizes[number], _BLOCK_BYTES)
            return
        lines = self._files.extent[slice(*np.searchsorted(self._files.file, [number, number + 1]))]
        lines = lines[slice(*np.searchsorted(lines[:, 0], [block * _BLOCK_BYTES, (block + 1) * _BLOCK_BYTES]))].tolist()
        data = files.read(file, lines[0][0], lines[-1][1]) if lines else b""
        for start, stop in lines:
            self._parse_line(data[start - lines[0][0] : stop - lines[0][0]], file, start)

    def _read_text(self, file: str, piece: int, size: int, max_bytes: int) -> str:
        data = _piece(piece, size, max_bytes, functools.partial(files.read, file))
        is_beginning = piece == 0 and self._rules > 1
        if not self._is_library:
            from src.data.readers.text_files import EXPECTED, HEAD_BYTES, other_format

            if flaw := (is_beginning and other_format(file, data[:HEAD_BYTES])) or _flaw(data):
                raise UserError(f"{file} {flaw}. {EXPECTED}")
        return data.decode("utf-8-sig" if is_beginning else "utf-8")

    def _read_line(self, file: str, start: int, stop: int) -> bytes | np.ndarray:
        """Reads the document in a .jsonl file's line at bytes [start, stop): a text in UTF-8, or ids."""
        return self._parse_line(files.read(file, start, stop), file, start)

    def _parse_line(self, line: bytes, file: str, start: int) -> bytes | np.ndarray:
        from src.data.readers.fields import from_json

        try:
            document = self._nulls(from_json(line, self._column))
        except ValueError as error:
            place = files.line_name(file, start)
            is_of_field = str(error).startswith(("it has no field", "its field"))  # rather than invalid JSON
            hint = f" (dataset_column={self._column} names the field)" if is_of_field else ""
            raise UserError(f"{place}: {error}{hint}") from None
        return document.encode() if isinstance(document, str) else document


def standard_library() -> files.Listing:
    """Lists the standard library's .py files, except files that are not UTF-8 (tests of source encodings)."""
    folder = sysconfig.get_path("stdlib")
    sizes = {}
    for name in sorted(files.walk(folder, ("site-packages", "dist-packages", "__pycache__"))):
        if name.endswith(".py") and not _flaw(data := (Path(folder) / name).read_bytes()):
            sizes[name] = len(data)
    if not sizes:
        raise UserError(f"this Python has no source of its standard library in {folder}: give dataset_path=PATH")
    return files.Listing(folder, sizes)


def _extents(file: str, size: int) -> np.ndarray:
    """Finds the bytes at which a file's documents begin and end: int64 [documents, 2], empty for an empty file."""
    if not is_jsonl(file):
        return np.array([(0, size)] if size else [], np.int64).reshape(-1, 2)
    line_ends = []
    at = 0
    for chunk in files.chunks(file, size):
        line_ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + at)
        at += len(chunk)
    stops = np.concatenate([*line_ends, [at]])
    starts = np.concatenate([[0], stops[:-1] + 1])
    return np.stack([starts, stops], axis=1)[stops - starts >= len("{}")]  # a shorter line cannot hold an object


def _count_pieces(sizes: Any, max_bytes: int) -> Any:
    return -(-sizes // (max_bytes - int(_CUT_WINDOW * max_bytes)))


def _piece(number: int, size: int, max_bytes: int, read: Callable[[int, int], bytes]) -> bytes:
    """Reads piece `number` of a document of `size` bytes by `read(begin, end)`; empty past the last piece."""
    # Cuts depend only on the document and are found from the bytes around them, so each piece can be read separately.
    count, window = _count_pieces(size, max_bytes), int(_CUT_WINDOW * max_bytes)
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


def _flaw(data: bytes) -> str:
    """Explains why bytes are not text, as the end of a sentence; empty if they are text."""
    if b"\0" in data:
        return "is not a text file: it has a NUL byte"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"is not a text file: it is not UTF-8 ({error.reason}: {data[error.start :][:20]!r})"
    return ""


def open_source(spec: DatasetSpec, inputs: InputSpec) -> TextSource:
    """Opens text files or JSONL, or the Python standard library's source if no path is named."""
    keys = spec.key("dataset_path"), spec.dataset_column
    return TextSource(spec.dataset_path, spec.max_document_bytes, *keys, inputs.rules)
