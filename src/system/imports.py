"""Imports optional parts of the code only when a run needs them."""

from importlib import import_module
from types import ModuleType
from typing import Any

from src.system.errors import MissingExtra


def optional(module: str) -> ModuleType | None:
    """Imports the module `src.extras.<module>`; None if it or its folder has been deleted.

    Raises MissingExtra if it is there but imports an extra that is not.
    """
    try:
        return import_module(f"src.extras.{module}")
    except MissingExtra as error:
        missing = str(error.name).partition(".")[2]  # after the package's name
        if f"extras.{module}.".startswith(f"{missing}."):
            return None
        raise


def named(place: Any) -> Any:
    """Imports the object that a string `module:name` in a table names; returns other objects as they are."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
