"""Finds and reads files on stores with fsspec, for paths with a protocol such as gs://."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from src.system.errors import UserError
from src.system.storage_errors import attempted

_REQUESTS, _DEPTH = 128, 6  # maximum reads at a time, and reads ahead of each packing stream

Result = TypeVar("Result")


def read(file: str, begin: int, end: int) -> bytes:
    """Reads the bytes [begin, end) of a file in one request; raises as `_on_store` does."""
    return _on_store(file, file, lambda fs, place: fs.cat_file(place, begin, end)) if begin < end else b""


def version(file: str) -> tuple[Any, ...]:
    """Reads a file's size, and metadata that change when it is written; raises as `_on_store` does."""
    info = _on_store(file, file, lambda fs, place: fs.invalidate_cache() or fs.info(place))
    return info.get("size"), str(info)


def find(path: str, setting: str, fixed_part: str) -> tuple[str, str | None, dict[str, int]]:
    """Finds the files of a path, given its part without wildcards; returns a `find_files._Found`.

    Raises as `_on_store` does; `setting` names the path in messages.
    """

    def look(fs: Any, place: str) -> tuple[str, str | None, dict[str, dict]]:
        fs.invalidate_cache()  # cached listings may be older than the files
        try:
            info = fs.info(place)
        except FileNotFoundError:
            return fixed_part, os.path.basename(path), fs.glob(place, detail=True)
        if info["type"] == "directory":
            return path, "", fs.find(place, detail=True)
        return path.removesuffix(os.path.basename(path)), None, {place: info}

    folder, pattern, infos = _on_store(path, setting, look)
    top = _on_store(folder, setting, lambda _, place: place)
    sizes = {name.removeprefix(top).lstrip("/"): info["size"] for name, info in infos.items() if info["type"] == "file"}
    if pattern is not None:
        # Leaves out hidden files, and the empty object "folder/" with which some stores imitate a folder.
        sizes = {
            name: size for name, size in sizes.items() if not any(part[:1] in (".", "") for part in name.split("/"))
        }
    return folder, pattern, sizes


class ReadAhead(Generic[Result]):
    """Calls `read(ordinal)`, and prefetches the stream's following ordinals in threads: `stride` apart, below `end`.

    Each stream may call from its own thread. An error in `read` is raised when its ordinal is requested.
    """

    def __init__(self, read: Callable[[int], Result], stride: int, end: float) -> None:
        self._read, self._stride, self._end = read, stride, end
        self._start()

    def __call__(self, ordinal: int) -> Result:
        """Waits for `read(ordinal)`, and starts the next reads."""
        for coming in range(ordinal, ordinal + (_DEPTH + 1) * self._stride, self._stride):
            if coming not in self._begun and coming < self._end:
                self._begun[coming] = self._pool.submit(self._read, coming)
        return self._begun.pop(ordinal).result()

    def close(self) -> None:
        """Cancels the reads that have not started; later calls start again.

        Otherwise the process would make all waiting reads before it ends, and retry each of them if the store fails.
        """
        pool = self._pool
        self._start()
        pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="read-ahead")  # starts its threads on demand
        self._begun: dict[int, Future[Result]] = {}


def _on_store(path: str, what: str, use: Callable[[Any, str], Result]) -> Result:
    """Calls `use` with a path's file system and its name for the path.

    Raises as `attempted` does, and UserError if the package for the protocol is missing.
    """
    from fsspec.core import url_to_fs

    try:
        return attempted(what, lambda: use(*url_to_fs(path)))
    except ImportError as error:
        raise UserError(
            f"{what}: {error}. Such paths need a separate package: .venv/bin/python -m pip install PACKAGE"
        ) from error
