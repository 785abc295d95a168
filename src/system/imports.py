"""Imports what only some runs need, when they need it."""

from importlib import import_module
from types import ModuleType
from typing import Any

from src.system.errors import MissingExtra


def optional(module: str) -> ModuleType | None:
    """Returns the module `src.extras.<module>`, or None if its folder has been deleted."""
    try:
        return import_module(f"src.extras.{module}")
    except MissingExtra:
        return None


def named(place: Any) -> Any:
    """Returns what `module:name` names, an entry of a table of optional parts; other entries as they are."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
