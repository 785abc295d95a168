"""The files behind a text source: finding them, the documents in them, and the pieces of a document."""

import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from src.data import order
from src.errors import UserError

# A cut is made at a line end if there is one in this part of a piece before its place.
_CUT_WINDOW = 1 / 8

# What other dataset types keep their data in: part of a file's name -> the type.
_OTHER_TYPES = {
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".parquet": "parquet",
    ".tfrecord": "tfrecord",
}


class DocumentFiles:
    """The documents in files, numbered: each file is one, or in a .jsonl file each line.

    Files are taken in the order of their names.

    Args:
        path: a file, a folder (its files at any depth, but for hidden ones) or a glob. Empty: the source code of the
            running Python's standard library.
        key: the config key that gave `path`, for messages.

    Raises:
        UserError: nothing there, or no document in it.
    """

    def __init__(self, path: str, key: str) -> None:
        root, self._names = list_files(path, key)
        self.paths = [root / name for name in self._names]
        extents = [documents(path) for path in self.paths]
        # Of each document: its file, and where in the file it begins and ends.
        self.file = np.repeat(np.arange(len(extents)), [len(extent) for extent in extents])
        self.extent = np.concatenate([*extents, np.empty((0, 2), np.int64)])
        if not len(self.file):
            raise UserError(f"{key}={path} has no document: expected text files, or .jsonl files, that are not empty")

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.file)

    def locate(self, document: int) -> tuple[Path, int, int]:
        """The file of a document, and the bytes in it where the document begins and ends."""
        start, stop = self.extent[document].tolist()
        return self.paths[self.file[document]], start, stop

    def keys(self) -> np.ndarray:
        """uint64 [documents]: a hash of file name and place in the file, which other files don't change."""
        names = np.array([order.keys("file", name)[0] for name in self._names], np.uint64)
        return order.mix64(names[self.file] + self.extent[:, 0].astype(np.uint64))

    def fingerprint(self) -> dict[str, str | int]:
        """Counts, and a digest of the files' names and sizes: what is inside the files is not read for it."""
        sizes = [path.stat().st_size for path in self.paths]
        listing = "\n".join(f"{size} {name}" for size, name in zip(sizes, self._names, strict=True))
        return {
            "files": len(sizes),
            "bytes": sum(sizes),
            "documents": len(self),
            "digest": hashlib.sha256(os.fsencode(listing)).hexdigest()[:16],
        }


def list_files(path: str, key: str) -> tuple[Path, list[str]]:
    """The files that a config's path names: the folder they are in, and their sorted names relative to it.

    Raises:
        UserError: there is nothing at `path`, or it is data of another type.
    """
    if not path:
        return _standard_library()
    place = Path(path).expanduser()
    if place.is_dir():
        root, names = place, _walk(place)
    elif place.is_file():
        root, names = place.parent, [place.name]
    else:
        root = Path(*itertools.takewhile(lambda part: not set(part) & set("*?["), place.parts))
        pattern = str(place.relative_to(root))
        names = [name for name in glob.glob(pattern, root_dir=root, recursive=True) if (root / name).is_file()]
        if not names:
            raise UserError(f"{key}={path}: there is no such file or folder, and no file that matches")
    _refuse_other_types(root, names, f"{key}={path}")
    return root, sorted(names)


def _walk(root: Path, without: Collection[str] = ()) -> list[str]:
    """The files in a folder at any depth, but for hidden ones and those in hidden folders or in folders `without`."""
    names = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        inside = os.path.relpath(parent, root)
        names += [os.path.normpath(os.path.join(inside, name)) for name in files if not name.startswith(".")]
    return names


def _standard_library() -> tuple[Path, list[str]]:
    """As `list_files`, the .py files of the running Python's standard library, but for those that are not UTF-8.

    (Its tests of source encodings hold some that aren't.)
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _walk(root, ("site-packages", "dist-packages", "__pycache__")) if name.endswith(".py")]
    names = [name for name in names if _flaw((root / name).read_bytes()) is None]
    if not names:
        raise UserError(f"this Python has no source of its standard library in {root}: give dataset_path=PATH")
    return root, sorted(names)


def _refuse_other_types(root: Path, names: list[str], setting: str) -> None:
    """Raises UserError for data of another type, which would be read as text or refused one binary file at a time."""
    expected = "dataset_type=text reads text files and .jsonl"
    files = set(names)
    for name in names:
        folder, file = os.path.split(name)
        if file == "dataset_info.json" and os.path.join(folder, "features.json") in files:
            raise UserError(
                f"{setting}: {root / folder} is a TFDS dataset (dataset_info.json, features.json): data of type tfds, "
                f"not text. {expected}"
            )
    for name in names:
        for mark, kind in _OTHER_TYPES.items():
            if mark in name:
                raise UserError(f"{setting}: {root / name} is data of type {kind}, not text. {expected}")


def documents(path: Path) -> np.ndarray:
    """int64 [documents, 2]: where each document of a file begins and ends, in bytes. An empty file has none."""
    if is_jsonl(path):
        return _lines(path)
    with _open(path) as file:  # a link that leads nowhere is an error that names it
        size = os.fstat(file.fileno()).st_size
    return np.array([(0, size)] if size else [], np.int64).reshape(-1, 2)


def count_pieces(sizes: np.ndarray, max_bytes: int) -> np.ndarray:
    """Into how many pieces documents of these sizes in bytes are cut, so that none has more than `max_bytes`."""
    return -(-sizes // (max_bytes - _window(max_bytes)))


def read_piece(path: Path, start: int, stop: int, number: int, max_bytes: int, column: str) -> str:
    """The text of piece `number`, from 0, of the document in bytes [start, stop) of a file.

    A document has `count_pieces` of them. The last ones may be empty in a .jsonl file, where the text is only a part of
    the line, its field `column`.

    Raises:
        UserError: it can't be read or is not text.
    """
    if not is_jsonl(path):
        return _decode(_piece(number, stop, max_bytes, lambda begin, end: _read(path, begin, end)), path)
    text = _json_text(path, start, stop, column)
    return _piece(number, len(text), max_bytes, lambda begin, end: text[begin:end]).decode()


def is_jsonl(path: Path) -> bool:
    """Whether each line of the file is a document."""
    return path.suffix == ".jsonl"


def read_json(path: Path, start: int, stop: int) -> Any:
    """The value in bytes [start, stop) of a .jsonl file.

    Raises:
        UserError: they are not JSON.
    """
    try:
        return json.loads(_read(path, start, stop))
    except ValueError as error:
        raise UserError(f"{line_name(path, start)}: not JSON ({error})") from None


def line_name(path: Path, start: int) -> str:
    """What to call the line that begins at byte `start`, for a message: the lines before it are read to count them."""
    with _open(path) as file:
        number = 1
        while start > 0 and (chunk := file.read(min(start, 1 << 24))):
            number += chunk.count(b"\n")
            start -= len(chunk)
    return f"{path}, line {number}"


def well_formed(text: str) -> str:
    """The text with "?" for each surrogate without its pair: JSON can spell one, UTF-8 can't."""
    return text.encode(errors="replace").decode()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error


def _read(path: Path, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file, or those of them there are."""
    with _open(path) as file:
        file.seek(begin)
        return file.read(end - begin)


def _lines(path: Path) -> np.ndarray:
    """int64 [lines, 2]: where each line begins and ends, but for lines too short to hold a JSON object."""
    line_ends = []
    size = 0
    with _open(path) as file:
        while chunk := file.read(1 << 24):
            line_ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size)
            size += len(chunk)
    stops = np.concatenate([*line_ends, [size]])
    starts = np.concatenate([[0], stops[:-1] + 1])
    return np.stack([starts, stops], axis=1)[stops - starts >= len("{}")]


def _json_text(path: Path, start: int, stop: int, column: str) -> bytes:
    """The text in a field of a JSON object, in UTF-8."""
    document = read_json(path, start, stop)
    if not isinstance(document, dict) or not isinstance(document.get(column), str):
        found = _read(path, start, min(stop, start + 80))
        raise UserError(f'{line_name(path, start)}: expected a JSON object with a string "{column}", found {found!r}')
    return well_formed(document[column]).encode()


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


def _decode(data: bytes, path: Path) -> str:
    if (flaw := _flaw(data)) is not None:
        raise UserError(
            f"{path} is not a text file: {flaw}. dataset_type=text reads UTF-8; leave other files out with a glob, "
            "as in dataset_path='FOLDER/**/*.txt'"
        )
    return data.decode()
