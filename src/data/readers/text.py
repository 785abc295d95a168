"""Reads documents in text files and .jsonl files: `dataset_type=text`.

A long text is cut into pieces, so that no document fills a row of the batch for thousands of steps. After this module,
each piece is a document.
"""

import functools
import sysconfig
from pathlib import Path

import numpy as np

from src.config.dataset_spec import DatasetSpec
from src.data import order
from src.data.readers import files
from src.data.readers.files import is_jsonl
from src.data.readers.pieces import count_pieces, read_piece
from src.data.readers.records import Index, Nulls
from src.data.rules import PRESENT_RULES
from src.data.types import Fingerprint, InputSpec, Source
from src.system.errors import UserError, say

_KEPT_LINES = 4
_SOME_FILES = "expected text files, or .jsonl files, that are not empty"


class DocumentFiles:
    """Numbers the documents in files, in the order of file names: each file, or each line of a .jsonl file.

    `path` is a file, a folder (its files at any depth, except hidden ones) or a glob, local or remote; if empty, the
    source code of the running Python's standard library is read. Messages name its config key, `key`. Each .jsonl file
    is read once to find its lines, so a remote one is fetched completely. Raises UserError, ending with `expected`, if
    the files have no documents, and as `list_text_files` does.
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
    separate documents. With `rules` 1, opening checks nothing, and a byte order mark is read as text. Raises UserError
    if a file is not text, and as `DocumentFiles` does.
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
        self.files = DocumentFiles(path, key, rules=rules)
        self._is_library = not path
        self.listings = [self.files.listing]
        # Reading a piece means parsing its whole line, so the documents of the last few lines are cached.
        self._line = functools.lru_cache(maxsize=_KEPT_LINES)(self._read_line)
        self.index = Index(count_pieces(np.diff(self.files.extent)[:, 0], max_document_bytes))
        self._nulls = Nulls(f"{key}={path}")
        if path and rules > 1:  # listing the standard library has already read all of it
            from src.data.readers.text_check import check

            check(self, f"{key}={path}", files.is_remote(path))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> str | np.ndarray:
        """Reads piece `i`; it may be empty, because a document in JSON is shorter than its line.

        Raises as `read_text` and `parse_line` do.
        """
        document, piece = self.index.find(i)
        file, start, stop = self.files.locate(document)
        if not is_jsonl(file):
            return self.read_text(file, piece, stop, self._max_bytes)
        content = self._line(file, start, stop)
        if isinstance(content, bytes):
            return read_piece(piece, len(content), self._max_bytes, lambda begin, end: content[begin:end]).decode()
        count = int(self.index.starts[document + 1] - self.index.starts[document])
        return content[piece * len(content) // count : (piece + 1) * len(content) // count]

    def document_keys(self) -> np.ndarray:
        return np.repeat(self.files.document_keys(), np.diff(self.index.starts))

    def fingerprint(self) -> Fingerprint:
        cuts = {"type": "text", "pieces": len(self), "max_document_bytes": self._max_bytes}
        column = {} if self._column == "text" else {"column": self._column}  # old checkpoints don't name the default
        return {**self.files.fingerprint(), **cuts, **column}

    def read_text(self, file: str, piece: int, size: int, max_bytes: int) -> str:
        """Reads piece `piece` of a file of `size` bytes, cut at `max_bytes`; raises UserError if it is not text.

        Also raises UserError if the file has fewer bytes by now.
        """

        def read(begin: int, end: int) -> bytes:
            data = files.read(file, begin, end)
            if len(data) < min(end, size) - begin:
                raise UserError(f"{file} is shorter than when the run opened it: restore it and repeat the command")
            return data

        data = read_piece(piece, size, max_bytes, read)
        is_beginning = piece == 0 and self._rules > 1
        if not self._is_library:
            from src.data.readers.text_files import EXPECTED, HEAD_BYTES, other_format

            if flaw := (is_beginning and other_format(file, data[:HEAD_BYTES])) or _flaw(data):
                raise UserError(f"{file} {flaw}. {EXPECTED}")
        return data.decode("utf-8-sig" if is_beginning else "utf-8")

    def _read_line(self, file: str, start: int, stop: int) -> bytes | np.ndarray:
        """Reads the document in a .jsonl file's line at bytes [start, stop): a text in UTF-8, or ids."""
        return self.parse_line(files.read(file, start, stop), file, start)

    def parse_line(self, line: bytes, file: str, start: int) -> bytes | np.ndarray:
        """Reads the document in a line at byte `start`: a text in UTF-8, or ids; raises as `from_line` does."""
        from src.data.readers.fields import from_line

        document = self._nulls(from_line(line, self._column, file, start))
        return document.encode() if isinstance(document, str) else document


def standard_library() -> files.Listing:
    """Lists the standard library's .py files, except files that are not UTF-8; raises UserError if there are none."""
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
    """Opens text files or JSONL, or the Python standard library's source if no path is named.

    Prints a message if `dataset_column` has no effect on them. Raises as `TextSource` does.
    """
    keys = spec.key("dataset_path"), spec.dataset_column
    source = TextSource(spec.dataset_path, spec.max_document_bytes, *keys, inputs.rules)
    if spec.dataset_column != "text" and not any(map(is_jsonl, source.files.listing.sizes)):
        where = spec.setting("dataset_path") if spec.dataset_path else "Python's own source"
        say([f"{spec.setting('dataset_column')} has no effect on {where}: none of its files is .jsonl"])
    return source
