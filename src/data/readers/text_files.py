"""The files behind a text source: the documents in them, and the pieces of a document."""

import functools
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from src.data import order
from src.data.readers import files
from src.data.readers.documents import from_json, parse_json
from src.errors import UserError

# A cut is made at a line end if there is one in this part of a piece before its place.
_CUT_WINDOW = 1 / 8
_FIRST_LINE_BYTES = 1 << 20

# What other dataset types keep their data in: part of a file's name -> the type.
_OTHER_TYPES = {
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".parquet": "parquet",
    ".tfrecord": "tfrecord",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".7z")


class DocumentFiles:
    """The documents in files, numbered: each file is one, or in a .jsonl file each line.

    Files are taken in the order of their names. Each .jsonl file is read through once to find its lines: of a remote
    one, all of it is fetched for that.

    Args:
        path: a file, a folder (its files at any depth, but for hidden ones) or a glob, local or remote. Empty: the
            source code of the running Python's standard library.
        key: the config key that gave `path`, for messages.

    Attributes:
        files: their paths.
        file: int [documents], which of `files` each document is in.
        extent: int64 [documents, 2], where in its file each begins and ends, in bytes.

    Raises:
        UserError: nothing there, or no document in it.
    """

    def __init__(self, path: str, key: str) -> None:
        self._listing = list_text_files(path, key)
        self.files = self._listing.files()
        extents = [_extents(file, size) for file, size in zip(self.files, self._listing.sizes, strict=True)]
        self.file = np.repeat(np.arange(len(extents)), [len(extent) for extent in extents])
        self.extent = np.concatenate([*extents, np.empty((0, 2), np.int64)])
        if not len(self.file):
            raise UserError(f"{key}={path} has no document: expected text files, or .jsonl files, that are not empty")

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.file)

    def locate(self, document: int) -> tuple[str, int, int]:
        """The file of a document, and the bytes in it where the document begins and ends."""
        start, stop = self.extent[document].tolist()
        return self.files[self.file[document]], start, stop

    def extents(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each file that has documents, and its part of `extent`."""
        bounds = np.searchsorted(self.file, np.arange(len(self.files) + 1))
        for file, first, end in zip(self.files, bounds, bounds[1:], strict=False):
            if first < end:
                yield file, self.extent[first:end]

    def keys(self) -> np.ndarray:
        """uint64 [documents]: a hash of file name and place in the file, which other files don't change."""
        names = np.array([order.keys("file", name)[0] for name in self._listing.names], np.uint64)
        return order.mix64(names[self.file] + self.extent[:, 0].astype(np.uint64))

    def fingerprint(self) -> dict[str, str | int]:
        """Of the files, and how many documents are in them."""
        return {**self._files_fingerprint, "documents": len(self)}

    @functools.cached_property
    def _files_fingerprint(self) -> dict[str, str | int]:
        return files.fingerprint(self._listing)  # reads a sample of contents: of a store that is hundreds of requests


def list_text_files(path: str, key: str) -> files.Listing:
    """The files that a config's path names, as `files.list_files` does; empty: the running Python's standard library.

    Raises:
        UserError: there is nothing at `path`, or it is data of another type.
    """
    if not path:
        return _standard_library()
    listing = files.list_files(path, key)
    _refuse_other_types(listing, f"{key}={path}")
    return listing


def _standard_library() -> files.Listing:
    """The .py files of the running Python's standard library, but for those that are not UTF-8.

    (Its tests of source encodings hold some that aren't.)
    """
    folder = sysconfig.get_path("stdlib")
    sizes = {}
    for name in files.walk(folder, ("site-packages", "dist-packages", "__pycache__")):
        if name.endswith(".py") and _flaw(data := (Path(folder) / name).read_bytes()) is None:
            sizes[name] = len(data)
    if not sizes:
        raise UserError(f"this Python has no source of its standard library in {folder}: give dataset_path=PATH")
    return files.Listing(folder, sorted(sizes), [sizes[name] for name in sorted(sizes)])


def _refuse_other_types(listing: files.Listing, setting: str) -> None:
    """Raises UserError for data of another type, which would be read as text or refused one binary file at a time."""
    expected = "dataset_type=text reads text files and .jsonl"
    names = set(listing.names)
    for name in listing.names:
        folder, file = os.path.split(name)
        if file == "dataset_info.json" and os.path.join(folder, "features.json") in names:
            place = os.path.join(listing.folder, folder).rstrip("/")
            raise UserError(
                f"{setting}: {place} is a TFDS dataset (dataset_info.json, features.json): data of type tfds, "
                f"not text. {expected}"
            )
    for name, file in zip(listing.names, listing.files(), strict=True):
        for mark, kind in _OTHER_TYPES.items():
            if mark in name:
                raise UserError(f"{setting}: {file} is data of type {kind}, not text. {expected}")
        if name.endswith(_COMPRESSED):
            raise UserError(f"{setting}: {file} is compressed. {expected}, as they are: unpack it first")
        if name.lower().endswith((".json", ".jsonl", ".ndjson")) and not is_jsonl(name) and _has_json_lines(file):
            raise UserError(
                f"{setting}: {file} has JSON lines, which would be read as they stand, braces and all. {expected}: "
                "rename it to end with .jsonl"
            )


def _has_json_lines(file: str) -> bool:
    """Whether the first line of a file is a JSON object by itself, and another line follows."""
    begin = files.read(file, 0, _FIRST_LINE_BYTES)
    first, line_end, rest = begin.partition(b"\n")
    try:
        return bool(line_end and rest.strip()) and isinstance(parse_json(first), dict)
    except ValueError:
        return False


def _extents(file: str, size: int) -> np.ndarray:
    """int64 [documents, 2]: where each document of a file begins and ends, in bytes. An empty file has none.

    For that a .jsonl file is read through once; another file is not read at all.
    """
    if is_jsonl(file):
        return _lines(file, size)
    return np.array([(0, size)] if size else [], np.int64).reshape(-1, 2)


def count_pieces(sizes: np.ndarray, max_bytes: int) -> np.ndarray:
    """Into how many pieces documents of these sizes in bytes are cut, so that none has more than `max_bytes`."""
    return -(-sizes // (max_bytes - _window(max_bytes)))


def read_piece(
    file: str, start: int, stop: int, number: int, max_bytes: int, line: Callable[[str, int, int], bytes | np.ndarray]
) -> str | np.ndarray:
    """The text or ids of piece `number`, from 0, of the document in bytes [start, stop) of a file.

    A document has `count_pieces` of them. The last ones may be empty in a .jsonl file, where the document is only a
    part of the line, one of its fields: `line` is `read_line` for that field.

    Raises:
        UserError: it can't be read, or is neither text nor, in a .jsonl file, ids.
    """
    if not is_jsonl(file):
        return _decode(_piece(number, stop, max_bytes, lambda begin, end: files.read(file, begin, end)), file)
    document = line(file, start, stop)
    if isinstance(document, bytes):
        return _piece(number, len(document), max_bytes, lambda begin, end: document[begin:end]).decode()
    count = int(count_pieces(np.int64(stop - start), max_bytes))
    return document[number * len(document) // count : (number + 1) * len(document) // count]


def read_line(file: str, start: int, stop: int, column: str) -> bytes | np.ndarray:
    """Returns the document in the line at bytes [start, stop) of a .jsonl file: a text in UTF-8, or ids.

    Raises:
        UserError: the line is not a JSON object with either in the field `column`.
    """
    try:
        document = from_json(files.read(file, start, stop), column)
    except ValueError as error:
        raise UserError(f"{line_name(file, start)}: {error} (dataset_column={column} names the field)") from None
    return document.encode() if isinstance(document, str) else document


def is_jsonl(file: str) -> bool:
    """Whether each line of the file is a document."""
    return file.endswith(".jsonl")


def line_name(file: str, start: int) -> str:
    """What to call the line that begins at byte `start`, for a message: the lines before it are read to count them."""
    lines_before = sum(chunk.count(b"\n") for chunk in files.chunks(file, start))
    return f"{file}, line {lines_before + 1}"


def _lines(file: str, size: int) -> np.ndarray:
    """int64 [lines, 2]: where each line begins and ends, but for lines too short to hold a JSON object."""
    line_ends = []
    at = 0
    for chunk in files.chunks(file, size):
        line_ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + at)
        at += len(chunk)
    stops = np.concatenate([*line_ends, [at]])
    starts = np.concatenate([[0], stops[:-1] + 1])
    return np.stack([starts, stops], axis=1)[stops - starts >= len("{}")]


def _window(max_bytes: int) -> int:
    return int(_CUT_WINDOW * max_bytes)


def _piece(number: int, size: int, max_bytes: int, read: Callable[[int, int], bytes]) -> bytes:
    """Piece `number` of a document of `size` bytes; empty past the last.

    Cuts are a function of the document alone, and each can be found from the bytes around it: every piece can be read
    without the others.

    Args:
        number: from 0.
        size: of the document, in bytes.
        max_bytes: of a piece.
        read: (begin, end) -> those bytes of the document, or those of them there are.
    """
    count, window = int(count_pieces(np.int64(size), max_bytes)), _window(max_bytes)
    if number >= count:
        return b""
    begin, end = number * size // count, (number + 1) * size // count
    offset = max(begin - window, 0)
    data = read(offset, end + 1)
    first = _cut(data, begin - offset, window) if number > 0 else 0
    last = _cut(data, end - offset, window) if number + 1 < count else size - offset
    return data[first:last]


def _cut(data: bytes, at: int, window: int) -> int:
    """Where to cut instead of `at`: after the last line end at most `window` before it, else before a character."""
    line_end = data.rfind(b"\n", max(at - window, 0), at)
    if line_end >= 0:
        return line_end + 1
    while at > 0 and data[at] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        at -= 1
    return at


def _flaw(data: bytes) -> str | None:
    """Why bytes are not text; None if they are."""
    if b"\0" in data:
        return "it has a NUL byte"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: {error.reason}"
    return None


def _decode(data: bytes, file: str) -> str:
    if (flaw := _flaw(data)) is not None:
        raise UserError(
            f"{file} is not a text file: {flaw}. dataset_type=text reads UTF-8; leave other files out with a glob, "
            "as in dataset_path='FOLDER/**/*.txt'"
        )
    return data.decode()
