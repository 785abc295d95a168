"""Finds files on local and remote paths, reads parts of them, and tells one set of files from another.

A path with a protocol (gs://, s3://, ...) is remote and read by fsspec. Any other is local, as is one with file://.
"""

import bisect
import dataclasses
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from src.data.rules import PRESENT_RULES
from src.data.types import Fingerprint
from src.system.disk import new_file
from src.system.errors import TransientError, UserError, changed_keys, counted, first_few, say
from src.system.storage_errors import Failure, failure_of, retried

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_MAX_NAMED = 100  # files that a fingerprint names one by one, so that an error can say which of them is another
_CHUNK_BYTES = 1 << 24
_THREADS = 32
_REQUESTS, _DEPTH = 128, 6  # that read ahead: at a time, and for each packing stream
# What a fingerprint reads of the files: all of them, or so many blocks spread evenly over their bytes.
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 1 << 16
_WATCHED, _WATCHED_IN_STORES = 1 << 14, 1 << 6  # files of which a run looks whether they are written
# Of more than six digits it is no number of files, and to look for the missing ones would not end.
_SHARD = re.compile(r"(?P<before>.*?)(?<!\d)(?P<number>\d{3,6})-of-(?P<total>\d{3,6})(?!\d)(?P<after>[^/]*)")
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


def list_files(path: str, key: str, rules: int = PRESENT_RULES) -> Listing:
    """Lists the files of a config's path: a file, a folder (its files at any depth, but for hidden ones) or a glob.

    Links to folders are followed, and in a folder and by `**` each folder is read once, whatever its names.

    Raises UserError where nothing is there, nothing here can read such a path, or a file of a numbered set
    (x-00000-of-00010 and so on) is missing that a folder or a glob would have. `key` is the path's, for messages.
    """
    if not path:
        raise UserError(f"{key} is empty: expected a file, a folder or a glob")
    setting = f"{key}={path}"
    folder, pattern, sizes = _find_remote(path, setting) if is_remote(path) else _find_local(path, rules)
    if pattern and not sizes:
        raise UserError(f"{setting}: there is no such file or folder, and no file that matches")
    if pattern is not None:
        _check_no_gaps(sizes, pattern or "*", setting)
    return Listing(folder, dict(sorted(sizes.items())), pattern == "", setting, rules)


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


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not parts or not pattern:
        return not parts and not pattern
    if pattern[0] == "**":
        return any(_fits(parts[start:], pattern[1:] or "*") for start in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def size(file: str) -> int:
    """Returns the size of a local file in bytes; raises as `attempted`, and UserError for a pipe or a device."""
    found = attempted(file, lambda: os.stat(file))
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{file} is no regular file: leave it out, by a glob that does not match it")
    return found.st_size


def _version(file: str) -> tuple[Any, ...]:
    if is_remote(file):
        info = _remote(file, file, lambda fs, place: fs.invalidate_cache() or fs.info(place))
        return info.get("size"), str(info)
    found = attempted(file, lambda: os.stat(file.removeprefix("file://")))
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def read(file: str, begin: int, end: int) -> bytes:
    """Reads the bytes [begin, end) of a file, or those of them there are; raises as `attempted`."""
    if is_remote(file):  # one request; local files are not read by fsspec, which takes twice as long
        return _remote(file, file, lambda fs, place: fs.cat_file(place, begin, end)) if begin < end else b""

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


def open_remote(file: str, length: int) -> IO[bytes]:
    """Opens a remote file of `length` bytes for a library. Each read is a request, and nothing is read ahead."""
    from fsspec.spec import AbstractBufferedFile

    class RemoteFile(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return read(file, start, end)

    return RemoteFile(None, file, cache_type="none", size=length)


class LocalCopies:
    """Copies remote files to this machine's temporary folder, where they stay as long as this object does."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mintext-")

    def path(self, file: str, length: int) -> str:
        """Returns the path of the copy of a file of `length` bytes; raises as `attempted`."""
        copy = os.path.join(self._folder.name, hashlib.sha256(file.encode()).hexdigest()[:32])
        if not os.path.exists(copy):
            with new_file(Path(copy)) as opened:  # another thread may copy it too
                opened.writelines(chunks(file, length))
        return copy


class ReadAhead:
    """Calls `read(ordinal)`, and in threads those of the next ordinals of the same stream, `stride` apart, below `end`.

    Streams may call from threads of their own. An error is raised where its ordinal is asked for.
    """

    def __init__(self, read: Callable[[int], Result], stride: int, end: float) -> None:
        self._read, self._stride, self._end = read, stride, end
        self._start()

    def __call__(self, ordinal: int) -> Result:
        """Returns `read(ordinal)`."""
        for coming in range(ordinal, ordinal + (_DEPTH + 1) * self._stride, self._stride):
            if coming not in self._begun and coming < self._end:
                self._begun[coming] = self._pool.submit(self._read, coming)
        return self._begun.pop(ordinal).result()

    def close(self) -> None:
        """Drops what is not read yet; a later call begins anew.

        Reads that are waiting would otherwise be made before the process ends, each of them again and again where the
        store fails.
        """
        pool = self._pool
        self._start()
        pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="read-ahead")  # whose threads start with calls
        self._begun: dict[int, Future[Result]] = {}


# A folder, what the names of files in it match ("" for all of them, None for one file), and their sizes by name.
_Found = tuple[str, str | None, dict[str, int]]


def _find_local(path: str, rules: int) -> _Found:
    place, pattern = Path(path.removeprefix("file://")).expanduser(), None
    if place.is_dir():
        folder, pattern, names = place, "", walk(str(place), rules=rules)
    elif place.is_file():
        folder, names = place.parent, [place.name]
    else:
        folder, pattern = Path(_fixed_part(str(place))), place.name
        wanted = place.relative_to(folder)
        if "**" in wanted.parts and rules > 1:
            matches = [name for name in walk(str(folder)) if _fits(name.split("/"), wanted.parts)]
        else:
            matches = glob.glob(str(wanted), root_dir=folder, recursive=True)
        names = [name for name in matches if (folder / name).is_file()]
    return str(folder), pattern, {name: size(os.path.join(folder, name)) for name in names}


def _find_remote(path: str, setting: str) -> _Found:
    def find(fs: "AbstractFileSystem", place: str) -> tuple[str, str | None, dict[str, dict]]:
        fs.invalidate_cache()  # of listings: the files may be newer
        try:
            info = fs.info(place)
        except FileNotFoundError:
            return _fixed_part(path), os.path.basename(path), fs.glob(place, detail=True)
        if info["type"] == "directory":
            return path, "", fs.find(place, detail=True)
        return path.removesuffix(os.path.basename(path)), None, {place: info}

    folder, pattern, infos = _remote(path, setting, find)
    top = _remote(folder, setting, lambda _, place: place)
    sizes = {name.removeprefix(top).lstrip("/"): info["size"] for name, info in infos.items() if info["type"] == "file"}
    if pattern is not None:
        # Not hidden files, nor the empty object "folder/" that a store without folders may have in the place of one.
        sizes = {
            name: size for name, size in sizes.items() if not any(part[:1] in (".", "") for part in name.split("/"))
        }
    return folder, pattern, sizes


def _fixed_part(path: str) -> str:
    """Returns the folder of a path, up to the first part with a wildcard."""
    protocol, colon, place = path.rpartition("://")
    parts = place.split("/")[:-1]
    fixed = "/".join(itertools.takewhile(lambda part: not set(part) & set("*?["), parts))
    return protocol + colon + (fixed or ("/" if place.startswith("/") else ""))


def _check_no_gaps(names: Collection[str], pattern: str, setting: str) -> None:
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            # What follows the numbers may be a hash, another for each file, but for the file's type.
            kind = (match["before"], match["total"], os.path.splitext(match["after"])[1])
            sets.setdefault(kind, {})[int(match["number"])] = match["after"]
    for (before, total, _), numbers in sets.items():
        first = int(0 not in numbers and int(total) in numbers)  # some count from 1
        (after, *other_ends) = set(numbers.values())
        unlisted = set(range(first, first + int(total))) - set(numbers)
        begins = [f"{before}{number:0{len(total)}}-of-{total}" for number in sorted(unlisted)]
        missing = [begin for begin in begins if fnmatch.fnmatch(os.path.basename(begin + after), pattern)]
        if missing:
            listed = first_few(begin if other_ends else begin + after for begin in missing)
            raise UserError(
                f"{setting}: of {int(total)} files {listed} {'is' if len(missing) == 1 else 'are'} missing. Restore "
                "what is missing, or leave it out on purpose by a glob that does not match it, such as x-0000[0-4]-of-*"
            )


def attempted(what: str, use: Callable[[], Result], otherwise: str = "can't be read") -> Result:
    """Returns `use()`, which reads from a disk or a store; several attempts are made where failures may pass.

    Raises TransientError where such a failure stayed, and UserError for anything else, which stores and libraries each
    have errors of their own for. Messages begin with `what`; `otherwise` is what to say of it.
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
