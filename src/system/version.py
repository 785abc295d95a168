"""Reads MinText's version."""

import tomllib
from importlib import metadata

from src import FOLDER

CHECKOUT = FOLDER.parent if (FOLDER.parent / "pyproject.toml").exists() else None  # None: pip has installed it


def version() -> str:
    """Reads MinText's version from pyproject.toml, its only source, or from the installed package."""
    if CHECKOUT is None:
        return metadata.version("mintext")
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def title() -> str:
    """Returns the first line that every command prints."""
    return f"MinText {version()}"
