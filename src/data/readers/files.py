"""Finds files on local and remote paths, reads parts of them, and fingerprints sets of files.

A path with a protocol (gs://, s3://, ...) is remote and read by fsspec. All other paths, and file://, are local.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from src.data.rules import PRESENT_RULES
from src.data.types import Fingerprint
from src.system.errors import changed_keys, counted, first_few, say
from src.system.storage_errors import attempted

_MAX_NAMED = 100  # files that a fingerprint lists individually, so that an error can name a changed one
_CHUNK_BYTES = 1 << 24
_THREADS = 32
# A fingerprint reads up to this many blocks: all bytes of the files, or blocks spread evenly over them.
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 1 << 16
_WATCHED, _WATCHED_IN_STORES = 1 << 14, 1 << 6  # files that a run checks for writes
# Names of files that describe the data next to them, and of markers such as _SUCCESS, but not of source code.
ABOUT_DATA = re.compile(r"(?:.*/)?(?:readme|licen[cs]e|notice|citation|dataset_infos?)\b[^/]*", re.IGNORECASE)
_MARKER = re.compile(r"(?:.*/)?_[^/]*(?<!\.py)(?<!\.pyi)(?<!\.c)(?<!\.h)(?<!\.js)(?<!\.ts)")

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Listing:
    """Holds the names and sizes of the files that a config's path names, in one folder."""

    folder: str  # as the user wrote it, with its protocol if it is remote
    sizes: dict[str, int]  # in bytes, by the files' names relative to the folder, sorted
    is_whole: bool = dataclasses.field(default=False, compare=False)  # the path is the folder, not a file or a glob
    setting: str = dataclasses.field(default="", compare=False)  # KEY=PATH in the config, for messages
    rules: int = dataclasses.field(default=PRESENT_RULES, compare=False)

    @functools.cached_property
    def paths(self) -> list[str]:
        """The files' full paths, as the functions of this module take them."""
        return [os.path.join(self.folder, name) for name in self.sizes]

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The number and total size of the files, a digest of names and sizes, and `contents`, a digest of the bytes.

        Above 16 MiB in total, contents are sampled in 256 blocks of 64 KiB, so that the time is bounded for any size (a
        store gets hundreds of requests). If there are at most a hundred files, each is also listed, as `file NAME`:
        SIZE. Raises as `attempted` does if a file can't be read.
        """
        files = sorted(self.sizes.items())
        listed = "\n".join(f"{size} {name}" for name, size in files)
        _ = self._versions  # recorded before any file is read
        return {
            "files": len(files),
            "bytes": sum(self.sizes.values()),
            "digest": hashlib.sha256(os.fsencode(listed)).hexdigest()[:16],
            "contents": self._contents_digest(),
        } | {f"file {name}": size for name, size in files if len(files) <= _MAX_NAMED}

    def only(self, is_read: Callable[[str], object]) -> "Listing":
        """Leaves out the files of a folder whose names `is_read` rejects, and prints them.

        From data rules 2 on, names that begin with `_`, such as _SUCCESS, are left out too, except source code. If the
        path is a file or a glob, keeps all files.
        """
        if not self.is_whole:
            return self
        passed = {name for name in self.sizes if not is_read(name) or (self.rules > 1 and _MARKER.fullmatch(name))}
        if passed:
            say([f"{self.setting}: {counted(len(passed), 'file')} passed over: {first_few(sorted(passed))}"])
        return dataclasses.replace(self, sizes={name: self.sizes[name] for name in self.sizes if name not in passed})

    @functools.cached_property
    def _versions(self) -> dict[str, tuple[Any, ...]]:
        """The size and other metadata of files, evenly spread over the list, to detect writes."""
        most = _WATCHED_IN_STORES if is_remote(self.folder) else _WATCHED
        watched = self.paths[:: len(self.paths) // most + 1]
        return dict(zip(watched, in_threads(_version, watched), strict=True))

    def written_since(self) -> tuple[str, bool]:
        """Returns a message about watched files that were written ("": none), and whether `fingerprint` has changed.

        It has if sizes or the digest `contents` differ. A write that changes neither is reported once.
        """
        before, now = self._versions, dataclasses.replace(self)
        if not (written := changed_keys(before, now._versions)):
            return "", False
        resized = any(before[file][0] != now._versions[file][0] for file in written)
        differs = resized or self.fingerprint["contents"] != now.fingerprint["contents"]
        how = "changed" if differs else "was written, with no change in size or in the compared contents,"
        before.update({} if differs else now._versions)
        return f"{first_few(written)} {how} while the run reads it", differs

    def _contents_digest(self) -> str:
        """Digests all bytes of the files in order, or evenly spaced blocks of them."""
        sizes = list(self.sizes.values())
        ends = list(itertools.accumulate(sizes))
        total = sum(sizes)
        if total <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
            blocks = [(path, 0, size) for path, size in zip(self.paths, sizes, strict=True)]
        else:
            blocks = []
            for number in range(_SAMPLED_BLOCKS):
                at = number * (total - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1)
                file = bisect.bisect_right(ends, at)
                begin = at - (ends[file] - sizes[file])
                # A block is cut at the end of its file.
                blocks.append((self.paths[file], begin, min(begin + _BLOCK_BYTES, sizes[file])))
        return hashlib.sha256(b"".join(in_threads(read, *zip(*blocks, strict=True)))).hexdigest()[:16]


def in_threads(function: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """Maps a function over arguments in threads, because reading files, maybe from a store, is mostly waiting."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, *arguments))


def is_remote(path: str) -> bool:
    """Tells whether a path is read by requests to a store."""
    return "://" in path and not path.startswith("file://")


def walk(folder: str, without: Collection[str] = (), rules: int = PRESENT_RULES) -> list[str]:
    """Lists a local folder's files at any depth, by their names relative to it.

    Skips hidden files and folders, and folders named in `without`; also, with a line for the user, folders that this
    user may not read. From data rules 2 on, follows links to folders. Raises OSError if the disk fails.
    """

    def on_error(error: OSError) -> None:
        if isinstance(error, PermissionError):
            say([f"{error.filename} is passed over: {error.strerror}"])
        elif not isinstance(error, FileNotFoundError):  # a folder that was deleted meanwhile has no files
            raise error

    names, seen = [], set()
    for parent, folders, files in os.walk(folder, onerror=on_error, followlinks=rules > 1):
        if (place := os.path.realpath(parent)) in seen:  # under another name, or through a link to a parent folder
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
        inside = os.path.relpath(parent, folder)
        names += [os.path.normpath(os.path.join(inside, name)) for name in files if not name.startswith(".")]
    return names


def _version(file: str) -> tuple[Any, ...]:
    if is_remote(file):
        from src.data.readers import stores

        return stores.version(file)
    found = attempted(file, lambda: os.stat(file.removeprefix("file://")))
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def read(file: str, begin: int, end: int) -> bytes:
    """Reads the bytes [begin, end) of a file, fewer at its end; raises as `attempted` does."""
    if is_remote(file):  # for local files fsspec would take twice as long
        from src.data.readers import stores

        return stores.read(file, begin, end)

    def read_local() -> bytes:
        with open(file.removeprefix("file://"), "rb") as opened:
            opened.seek(begin)
            return opened.read(end - begin)

    return attempted(file, read_local)


def chunks(file: str, end: int) -> Iterator[bytes]:
    """Yields the bytes [0, end) of a file, 16 MiB at a time; raises as `read` does."""
    return (read(file, begin, min(begin + _CHUNK_BYTES, end)) for begin in range(0, end, _CHUNK_BYTES))


def line_name(file: str, start: int) -> str:
    """Names the line that begins at byte `start`, for a message; reads the file up to it, raising as `chunks` does."""
    lines_before = sum(chunk.count(b"\n") for chunk in chunks(file, start))
    return f"{file}, line {lines_before + 1}"


def is_jsonl(file: str) -> bool:
    """Tells by a file's name whether each of its lines is a JSON object with a document."""
    return file.endswith(".jsonl")
