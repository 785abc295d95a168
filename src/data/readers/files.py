"""Finds files on local and remote paths, reads parts of them, and tells one set of files from another.

A path with a protocol (gs://, s3://, ...) is remote and read by fsspec. Any other is local, as is one with file://.
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
from typing import TYPE_CHECKING, Any, TypeVar

from src.data.rules import PRESENT_RULES
from src.data.types import Fingerprint
from src.system.errors import changed_keys, counted, first_few, say
from src.system.storage_errors import attempted

if TYPE_CHECKING:
    pass

_MAX_NAMED = 100  # files that a fingerprint names one by one, so that an error can say which of them is another
_CHUNK_BYTES = 1 << 24
_THREADS = 32
# What a fingerprint reads of the files: all of them, or so many blocks spread evenly over their bytes.
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 1 << 16
_WATCHED, _WATCHED_IN_STORES = 1 << 14, 1 << 6  # files of which a run looks whether they are written
# Paths of files that describe the data beside them; and of markers such as _SUCCESS, but not of source code.
ABOUT_DATA = re.compile(r"(?:.*/)?(?:readme|licen[cs]e|notice|citation|dataset_infos?)\b[^/]*", re.IGNORECASE)
_MARKER = re.compile(r"(?:.*/)?_[^/]*(?<!\.py)(?<!\.pyi)(?<!\.c)(?<!\.h)(?<!\.js)(?<!\.ts)")

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Listing:
    """Lists files in a folder."""

    folder: str  # as the user wrote it, with its protocol if it is remote
    sizes: dict[str, int]  # in bytes, by the files' names relative to the folder, sorted
    is_whole: bool = dataclasses.field(default=False, compare=False)  # the folder was named, not a file or a glob
    setting: str = dataclasses.field(default="", compare=False)  # what named it, for messages
    rules: int = dataclasses.field(default=PRESENT_RULES, compare=False)

    @functools.cached_property
    def paths(self) -> list[str]:
        """Returns the paths that the functions here take."""
        return [os.path.join(self.folder, name) for name in self.sizes]

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """Returns counts, a digest of the names and sizes, and `contents`, one of what is in them.

        Of more than 16 MiB in all, contents are sampled: 256 blocks of 64 KiB, so that the time is bounded whatever the
        size (of a store that is hundreds of requests). A hundred files or fewer are named one by one too, as
        `file NAME`: SIZE. Raises UserError where one can't be read.
        """
        files = sorted(self.sizes.items())
        listed = "\n".join(f"{size} {name}" for name, size in files)
        assert self._versions is not None  # they are looked at before anything is read
        return {
            "files": len(files),
            "bytes": sum(self.sizes.values()),
            "digest": hashlib.sha256(os.fsencode(listed)).hexdigest()[:16],
            "contents": self._contents_digest(),
        } | {f"file {name}": size for name, size in files if len(files) <= _MAX_NAMED}

    def only(self, is_read: Callable[[str], object]) -> "Listing":
        """Returns the files of a whole folder whose names `is_read` accepts, and prints which others are passed over.

        Names that begin with `_`, such as _SUCCESS, are passed over too, unless they are source code's.
        """
        if not self.is_whole:
            return self
        passed = {name for name in self.sizes if not is_read(name) or (self.rules > 1 and _MARKER.fullmatch(name))}
        if passed:
            say([f"{self.setting}: {counted(len(passed), 'file')} passed over: {first_few(sorted(passed))}"])
        return dataclasses.replace(self, sizes={name: self.sizes[name] for name in self.sizes if name not in passed})

    @functools.cached_property
    def _versions(self) -> dict[str, tuple[Any, ...]]:
        """Returns the size of some files, evenly spread over the list, and what else changes when one is written."""
        most = _WATCHED_IN_STORES if is_remote(self.folder) else _WATCHED
        watched = self.paths[:: len(self.paths) // most + 1]
        return dict(zip(watched, in_threads(_version, watched), strict=True))

    def written_since(self) -> tuple[str, bool]:
        """Says which files were written since `fingerprint` was taken, "" for none, and whether that is another now."""
        before, now = self._versions, dataclasses.replace(self)
        if not (written := changed_keys(before, now._versions)):
            return "", False
        resized = any(before[file][0] != now._versions[file][0] for file in written)
        differs = resized or self.fingerprint["contents"] != now.fingerprint["contents"]
        how = "changed" if differs else "was written, with no change in size or in what is compared of the contents,"
        before.update({} if differs else now._versions)
        return f"{first_few(written)} {how} while the run reads it", differs

    def _contents_digest(self) -> str:
        """Digests the files' bytes in order, or blocks of them at even distances."""
        sizes = list(self.sizes.values())
        ends = list(itertools.accumulate(sizes))
        total = sum(sizes)
        if total <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
            blocks = [(path, 0, size) for path, size in zip(self.paths, sizes, strict=True)]
        else:
            blocks = []
            for number in range(_SAMPLED_BLOCKS):
                at = number * (total - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1)
                file = bisect.bisect_right(ends, at)  # a block ends with its file
                begin = at - (ends[file] - sizes[file])
                blocks.append((self.paths[file], begin, min(begin + _BLOCK_BYTES, sizes[file])))
        return hashlib.sha256(b"".join(in_threads(read, *zip(*blocks, strict=True)))).hexdigest()[:16]


def in_threads(function: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """Calls a function in threads, as `map` does: reading a file, maybe of a store, mostly waits."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, *arguments))


def is_remote(path: str) -> bool:
    """Says whether a path is read by requests to a store."""
    return "://" in path and not path.startswith("file://")


def walk(folder: str, without: Collection[str] = (), rules: int = PRESENT_RULES) -> list[str]:
    """Lists a local folder's files at any depth, but for hidden ones and those in hidden folders or in `without`."""
    names, seen = [], set()
    for parent, folders, files in os.walk(folder, followlinks=rules > 1):
        if (place := os.path.realpath(parent)) in seen:  # by another name, or by a link to a folder around it
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
    """Reads the bytes [begin, end) of a file, or those of them there are; raises as `attempted`."""
    if is_remote(file):  # local files are not read by fsspec, which takes twice as long
        from src.data.readers import stores

        return stores.read(file, begin, end)

    def read_local() -> bytes:
        with open(file.removeprefix("file://"), "rb") as opened:
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


def is_jsonl(file: str) -> bool:
    """Says whether each line of the file is a document."""
    return file.endswith(".jsonl")
