"""Imports optional modules of `src/extras/`."""

from importlib import import_module
from types import ModuleType

from src.system.errors import MissingExtra


def optional(module: str) -> ModuleType | None:
    """Returns the module `src.extras.<module>`, or None if its folder has been deleted."""
    try:
        return import_module(f"src.extras.{module}")
    except MissingExtra:
        return None
