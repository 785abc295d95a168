"""Writes the files of a long compilation whole or not at all, and checks before it that they can be written."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from src.errors import UserError


def check_outputs(paths: Mapping[str, str]) -> None:
    """Raises UserError where no file can be written at a key's path, or two keys name one; leaves nothing behind."""
    keys: dict[Any, str] = {}
    for key, path in paths.items():
        try:
            target = _target(path)
            folder = target.parent
            while not _is_remote(path) and not folder.exists():
                folder = folder.parent
            probe = folder / f".{target.name}.{os.getpid()}.part"
            probe.write_bytes(b"")
            probe.unlink()
        except Exception as error:  # each store's client has its own types
            raise _cannot_write(key, path, error) from error
        if target in keys:
            raise UserError(f"{keys[target]} and {key} are both {path}: give each a file of its own")
        keys[target] = key


def write_output(key: str, path: str, content: bytes) -> None:
    """Writes a file and the folders that it needs; raises UserError where that fails."""
    try:
        target = _target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if _is_remote(path):  # a store shows an object when all of it is there
            target.write_bytes(content)
            return
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except Exception as error:  # each store's client has its own types
        raise _cannot_write(key, path, error) from error


def _is_remote(path: str) -> bool:
    return "://" in path


def _target(path: str) -> Any:
    """Returns the file to write: the target of a symbolic link, not the link."""
    if _is_remote(path):
        try:
            return epath.Path(path)
        except KeyError:
            protocol = path.partition("://")[0]
            raise ValueError(f"{protocol}:// is no protocol that is known here; gs:// and s3:// are") from None
    target = Path(os.path.realpath(os.path.expanduser(path)))
    if target.exists() and not target.is_file():
        raise ValueError("it is there, and no regular file")
    return target


def _cannot_write(key: str, path: str, error: Exception) -> UserError:
    reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return UserError(f"{key}={path}: cannot write it: {reason}")
