"""Builds sections of a configuration from a model's own keys."""

from collections.abc import Mapping
from typing import Any

from src.config.keys import frozen
from src.config.schema import SECTIONS, keys_of


def section_of(section: str, keys: Mapping[str, Any]) -> Any:
    """Builds a section from its keys among the flat `keys`, with defaults for the rest."""
    return SECTIONS[section](**{name: frozen(keys[name]) for name in keys_of(section) if name in keys})
