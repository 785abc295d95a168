"""Renames checkpoints that no run may resume from, and removes unfinished ones."""

import contextlib
import itertools
import time

import jax
from etils import epath

from src.checkpoint.run_folder import is_unfinished


def unused_name(directory: epath.Path, step: int, why: str) -> str:
    """Picks an unused name that is not a step number: `10.damaged`, or if that exists `10.damaged-2` and so on."""
    names = itertools.chain([f"{step}.{why}"], (f"{step}.{why}-{count}" for count in itertools.count(2)))
    return next(name for name in names if not (directory / name).exists())


def set_aside(directory: epath.Path, step: int, why: str) -> str:
    """Renames a checkpoint on process 0, or removes it if it is unfinished.

    Returns the new name; "" if there is no such checkpoint, or only an unfinished one.
    """
    folder = directory / str(step)
    if not folder.exists():
        return ""
    name = "" if is_unfinished(folder) else unused_name(directory, step, why)
    if jax.process_index() == 0:
        folder.rename(directory / name) if name else folder.rmtree()
    return name


def remove(folder: epath.Path) -> None:
    """Removes a folder to which unfinished writes may still add files, trying for 2 s.

    If files remain, the run's next start removes them before its first save.
    """
    for _ in range(20):
        with contextlib.suppress(Exception):
            folder.rmtree()
        if not folder.exists():
            return
        time.sleep(0.1)
