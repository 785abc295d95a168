"""Passes remote files to libraries that read files by themselves: as file objects, or as local copies."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from src.data.readers.files import chunks, read
from src.system.disk import new_file


def open_remote(file: str, length: int) -> Any:
    """Opens a remote file of `length` bytes as a file object.

    Each read is a request, which raises as `read` of src/data/readers/files.py does; nothing is read ahead.
    """
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
        """Copies a file of `length` bytes, unless that was done; returns the copy's path; raises as `chunks` does."""
        copy = os.path.join(self._folder.name, hashlib.sha256(file.encode()).hexdigest()[:32])
        if not os.path.exists(copy):
            with new_file(Path(copy)) as opened:  # another thread may copy it too
                opened.writelines(chunks(file, length))
        return copy
