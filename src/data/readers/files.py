"""Finds files on local and remote paths, reads parts of them, and tells one set of files from another.

A path with a protocol (gs://, s3://, ...) is remote and read by fsspec. Any other is local, as is one with file://.
"""

import bisect
import dataclasses
import fnmatch
import functools
import glob
import hashlib
import io
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from src.data.types import Fingerprint
from src.errors import TransientError, UserError
from src.storage_errors import Failure, failure_of, retried

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# A fingerprint of so many files or fewer names each, so that an error can say which of them is another.
_MAX_NAMED = 100
_CHUNK_BYTES = 1 << 24
# What a fingerprint reads of the files: all of them, or so many blocks spread evenly over their bytes.
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 1 << 16
# Of more than six digits it is no number of files, and to look for the missing ones would not end.
_SHARD = re.compile(r"(?P<before>.*?)(?<!\d)(?P<number>\d{3,6})-of-(?P<total>\d{3,6})(?!\d)(?P<after>[^/]*)")

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Listing:
    """Lists files in a folder.

    Attributes:

        folder: as the user wrote it, with its protocol if it is remote.
        names: relative to the folder, sorted.
        sizes: in bytes.
    """

    folder: str
    names: list[str]
    sizes: list[int]

    def files(self) -> list[str]:
        """Returns the files' paths, as the functions here take them."""
        return [os.path.join(self.folder, name) for name in self.names]

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """Counts, a digest of the files' names and sizes, and `contents`, one of what is in them.

        Of more than 16 MiB in all, contents are sampled: 256 blocks of 64 KiB, so that the time is bounded whatever the
        size (of a store that is hundreds of requests). A hundred files or fewer are named one by one too, as
        `file NAME`: SIZE.

        Raises:
            UserError: a file can't be read.
        """
        names = sorted(zip(self.names, self.sizes, strict=True))
        digest = hashlib.sha256(os.fsencode("\n".join(f"{size} {name}" for name, size in names))).hexdigest()[:16]
        named = {f"file {name}": size for name, size in names} if len(names) <= _MAX_NAMED else {}
        counts = {"files": len(names), "bytes": sum(self.sizes)}
        return {**counts, "digest": digest, "contents": _contents_digest(self), **named}


def is_remote(path: str) -> bool:
    """Says whether a path is read by requests to a store."""
    return "://" in path and not path.startswith("file://")


def list_files(path: str, key: str) -> Listing:
    """Lists the files of a config's path: a file, a folder (its files at any depth, but for hidden ones) or a glob.

    Args:
        path: local or remote.
        key: the config key that gave `path`, for messages.

    Raises:
        UserError: nothing is there, nothing here can read such a path, or a file of a numbered set (x-00000-of-00010
            and so on) is missing that a folder or a glob would have.
    """
    if not path:
        raise UserError(f"{key} is empty: expected a file, a folder or a glob")
    listing, pattern = (_list_remote if is_remote(path) else _list_local)(path, f"{key}={path}")
    if pattern:
        _refuse_gaps(listing.names, pattern, f"{key}={path}")
    return listing


def walk(folder: str, without: Collection[str] = ()) -> list[str]:
    """Lists a local folder's files at any depth, but for hidden ones and those in hidden folders or in `without`."""
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        inside = os.path.relpath(parent, folder)
        names += [os.path.normpath(os.path.join(inside, name)) for name in files if not name.startswith(".")]
    return names


def size(file: str) -> int:
    """Returns the size of a file in bytes; raises as `attempted`."""
    if is_remote(file):
        return _remote(file, file, lambda fs, place: fs.size(place))
    return attempted(file, lambda: os.stat(_local(file)).st_size)


def read(file: str, begin: int, end: int) -> bytes:
    """Reads the bytes [begin, end) of a file, or those of them there are; raises as `attempted`.

    Of a remote file this is one request. Local files are not read by fsspec, which takes twice as long.
    """
    if is_remote(file):
        return _remote(file, file, lambda fs, place: fs.cat_file(place, begin, end)) if begin < end else b""

    def read_local() -> bytes:
        with open(_local(file), "rb") as opened:
            opened.seek(begin)
            return opened.read(end - begin)

    return attempted(file, read_local)


def chunks(file: str, end: int) -> Iterator[bytes]:
    """Yields the bytes [0, end) of a file, 16 MiB at a time."""
    return (read(file, begin, min(begin + _CHUNK_BYTES, end)) for begin in range(0, end, _CHUNK_BYTES))


def line_name(file: str, start: int) -> str:
    """Names the line that begins at byte `start`, for a message; the lines before it are read to count them."""
    lines_before = sum(chunk.count(b"\n") for chunk in chunks(file, start))
    return f"{file}, line {lines_before + 1}"


def openable(file: str, size: int) -> "str | RemoteFile":
    """Returns what a library opens that takes paths and open files: the path of a local file, or a remote one, open."""
    return RemoteFile(file, size) if is_remote(file) else file


class RemoteFile(io.RawIOBase):
    """Opens a remote file for a library. Each read is a request, and nothing is read ahead.

    fsspec's own would read ahead megabytes that a reader of columns skips, and the one of memory:// is shared by all
    that open it.

    Args:
        file: its path.
        length: its size in bytes.
    """

    def __init__(self, file: str, length: int) -> None:
        self._file = file
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def read(self, count: int = -1) -> bytes:
        end = self._length if count < 0 else min(self._at + count, self._length)
        data = read(self._file, self._at, end)
        self._at += len(data)
        return data


def _contents_digest(listing: Listing) -> str:
    """Digests the files' bytes in order, or blocks of them at even distances."""
    ends = list(itertools.accumulate(listing.sizes))
    total, paths = ends[-1] if ends else 0, listing.files()
    if total <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
        blocks = [(path, 0, size) for path, size in zip(paths, listing.sizes, strict=True)]
    else:
        blocks = []
        for number in range(_SAMPLED_BLOCKS):
            at = number * (total - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1)
            file = bisect.bisect_right(ends, at)  # a block ends with its file
            begin = at - (ends[file] - listing.sizes[file])
            blocks.append((paths[file], begin, min(begin + _BLOCK_BYTES, listing.sizes[file])))
    digest = hashlib.sha256()
    with ThreadPoolExecutor(16) as pool:  # of a remote file each read is a request, which mostly waits
        for data in pool.map(lambda block: read(*block), blocks):
            digest.update(data)
    return digest.hexdigest()[:16]


def _list_local(path: str, setting: str) -> tuple[Listing, str]:
    """Returns the files, and the pattern that names belonging to them match; empty for a file by itself."""
    place = Path(_local(path)).expanduser()
    if place.is_dir():
        folder, pattern, names = place, "*", walk(str(place))
    elif place.is_file():
        folder, pattern, names = place.parent, "", [place.name]
    else:
        folder, pattern = Path(_fixed_part(str(place))), place.name
        found = glob.glob(str(place.relative_to(folder)), root_dir=folder, recursive=True)
        names = [name for name in found if (folder / name).is_file()]
        if not names:
            raise _nothing_there(setting)
    names.sort()
    return Listing(str(folder), names, [size(os.path.join(folder, name)) for name in names]), pattern


def _list_remote(path: str, setting: str) -> tuple[Listing, str]:
    def find(fs: "AbstractFileSystem", place: str) -> tuple[str, str, dict[str, dict]]:
        fs.invalidate_cache()  # of listings: the files may be newer
        try:
            info = fs.info(place)
        except FileNotFoundError:
            return _fixed_part(path), os.path.basename(path), fs.glob(place, detail=True)
        if info["type"] == "directory":
            return path, "*", fs.find(place, detail=True)
        return path.removesuffix(os.path.basename(path)), "", {place: info}

    folder, pattern, found = _remote(path, setting, find)
    top = _remote(folder, setting, lambda _, place: place)
    sizes = {name.removeprefix(top).lstrip("/"): info["size"] for name, info in found.items() if info["type"] == "file"}
    if pattern:
        # Hidden files, and the empty object "folder/" that a store without folders may have in the place of one.
        sizes = {
            name: size for name, size in sizes.items() if all(part[:1] not in (".", "") for part in name.split("/"))
        }
        if not sizes and pattern != "*":
            raise _nothing_there(setting)
    names = sorted(sizes)
    return Listing(folder, names, [sizes[name] for name in names]), pattern


def _fixed_part(path: str) -> str:
    """Returns the folder of a path, up to the first part with a wildcard."""
    protocol, colon, place = path.rpartition("://")
    parts = place.split("/")[:-1]
    fixed = "/".join(itertools.takewhile(lambda part: not set(part) & set("*?["), parts))
    return protocol + colon + (fixed or ("/" if place.startswith("/") else ""))


def _nothing_there(setting: str) -> UserError:
    return UserError(f"{setting}: there is no such file or folder, and no file that matches")


def _refuse_gaps(names: list[str], pattern: str, setting: str) -> None:
    """Raises UserError where a numbered set lacks a file whose name would match `pattern`."""
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            # What follows the numbers may be a hash, another for each file, but for the file's type.
            kind = (match["before"], match["total"], os.path.splitext(match["after"])[1])
            sets.setdefault(kind, {})[int(match["number"])] = match["after"]
    for (before, total, _), numbers in sets.items():
        first = int(0 not in numbers and int(total) in numbers)  # some count from 1
        (after, *more) = set(numbers.values())
        missing = (
            f"{before}{number:0{len(total)}}-of-{total}{after if not more else ''}"
            for number in range(first, first + int(total))
            if number not in numbers
            and fnmatch.fnmatch(os.path.basename(f"{before}{number:0{len(total)}}-of-{total}{after}"), pattern)
        )
        shown = list(itertools.islice(missing, 5))
        if shown:
            more_missing = sum(1 for _ in missing)
            listed = ", ".join(shown) + (f" and {more_missing} more" if more_missing else "")
            raise UserError(
                f"{setting}: of {int(total)} files {listed} {'is' if len(shown) == 1 else 'are'} missing. Restore what "
                "is missing, or leave it out on purpose by a glob that does not match it, such as x-0000[0-4]-of-*"
            )


def _local(path: str) -> str:
    return path.removeprefix("file://")


def attempted(what: str, use: Callable[[], Result], otherwise: str = "can't be read") -> Result:
    """Returns `use()`, which reads from a disk or a store; several attempts are made where failures may pass.

    Raises:
        TransientError: such a failure stayed. Its message begins with `what`, as the other's does.
        UserError: anything else went wrong, which stores and libraries each have errors of their own for; `otherwise`
            is what to say of it.
    """
    try:
        return retried(use)
    except (UserError, TransientError, ImportError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if failure_of(error) is Failure.TRANSIENT:
            raise TransientError(f"{what} can't be read, after several attempts: {reason}") from error
        raise UserError(f"{what} {otherwise}: {reason}") from error


def _remote(path: str, what: str, use: Callable[["AbstractFileSystem", str], Result]) -> Result:
    """Returns `use` of a path's file system and of its name for the path; raises as `attempted`."""
    from fsspec.core import url_to_fs

    try:
        return attempted(what, lambda: use(*url_to_fs(path)))
    except ImportError as error:
        raise UserError(
            f"{what}: {error}. What reads such paths is a package of its own: .venv/bin/python -m pip install PACKAGE"
        ) from error
