"""Writes files whole or not at all, and locks folders on a local disk."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from src.system.errors import UserError


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write, which appears whole when the block ends, or not at all if it raises.

    Several threads and processes may write it at a time. A process that is killed leaves `.NAME....part`.
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
    """Returns whether a path still names this open file, which others may have deleted or replaced."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(opened.fileno()), os.stat(path))
    return False


def any_path(path: Any) -> Any:
    """Returns the `epath.Path` of a local path or one on a store; raises UserError for an unknown protocol."""
    from etils import epath

    try:
        return epath.Path(path)
    except KeyError as error:
        raise UserError(f"{error.args[0]} is no protocol that is read here; gs:// and s3:// are") from None


def lock(folder: Path, message: str) -> int:
    """Makes a folder and locks it; raises UserError with the message if another process has locked it.

    The lock ends with the process, however that ends, or when the descriptor that this returns is closed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(message) from None
    return descriptor
