"""Writes files atomically, and locks folders on a local disk."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, BinaryIO

from src.system.errors import UserError


@contextlib.contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """Opens a file for writing that appears when the block ends, complete, or not at all if the block raises.

    Several threads and processes may write it at the same time. A killed process leaves `.NAME.PID-THREAD.part`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def names(path: Path, opened: IO[Any]) -> bool:
    """Tells whether a path still names this open file, which others may have deleted or replaced."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(opened.fileno()), os.stat(path))
    return False


def any_path(path: Any) -> Any:
    """Converts a local path or one on a store to `epath.Path`; raises UserError for an unknown protocol."""
    from etils import epath

    try:
        return epath.Path(path)
    except KeyError as error:
        raise UserError(f"{error.args[0]} is not a supported protocol; gs:// and s3:// are") from None


def lock(folder: Path, message: str) -> int:
    """Makes a folder and locks it; raises UserError with the message if another process has locked it.

    The lock ends when the process ends, in any way, or when the returned descriptor is closed.
    """
    while True:  # another process, which had locked the empty folder, may remove it at its end
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
            descriptor = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(message) from None
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                opened.pop_all()
                return descriptor
