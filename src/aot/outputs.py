"""Writes the files of a long compilation whole or not at all, and checks before it that they can be written."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from src.disk import new_file
from src.errors import UserError


def check_outputs(paths: Mapping[str, str]) -> None:
    """Raises UserError where no file can be written at a key's path, or two keys name one; leaves nothing behind."""
    keys: dict[Any, str] = {}
    for key, path in paths.items():
        with _writing(key, path) as target:
            folder = target.parent
            while "://" not in path and not folder.exists():
                folder = folder.parent
            probe = folder / f".{target.name}.{os.getpid()}.part"
            probe.write_bytes(b"")
            probe.unlink()
        if target in keys:
            raise UserError(f"{keys[target]} and {key} are both {path}: give each a file of its own")
        keys[target] = key


def write_output(key: str, path: str, content: bytes) -> None:
    """Writes a file and the folders that it needs; raises UserError where that fails."""
    with _writing(key, path) as target:
        target.parent.mkdir(parents=True, exist_ok=True)
        if "://" in path:  # a store shows an object when all of it is there
            target.write_bytes(content)
            return
        with new_file(target) as file:
            file.write(content)


@contextlib.contextmanager
def _writing(key: str, path: str) -> Iterator[Any]:
    """Yields the file to write, the target of a symbolic link; raises UserError for what fails in the block."""
    try:
        if "://" in path:
            try:
                target = epath.Path(path)
            except KeyError:
                protocol = path.partition("://")[0]
                raise ValueError(f"{protocol}:// is no protocol that is known here; gs:// and s3:// are") from None
        else:
            target = Path(os.path.realpath(os.path.expanduser(path)))
            if target.exists() and not target.is_file():
                raise ValueError("it is there, and no regular file")
        yield target
    except Exception as error:  # each store's client has its own types
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise UserError(f"{key}={path}: cannot write it: {reason}") from error
