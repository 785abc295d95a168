"""Imports optional parts of the code only when a run needs them."""

from importlib import import_module
from types import ModuleType
from typing import Any

from src.system.errors import MissingExtra


def optional(module: str) -> ModuleType | None:
    """Imports the module `src.extras.<module>`; None if its folder has been deleted."""
    try:
        return import_module(f"src.extras.{module}")
    except MissingExtra:
        return None


def named(place: Any) -> Any:
    """Imports the object `module:name`, such as an entry of a table of optional parts; returns other entries as is."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
