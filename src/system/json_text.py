"""Parses JSON of unknown origin; errors in it become ValueError or UserError."""

import json
from pathlib import Path
from typing import Any

from src.system.errors import UserError


def parse_json(text: str | bytes) -> Any:
    """Parses `text`; raises ValueError if it is not JSON, not UTF-8, or nested too deeply for Python.

    The message completes a sentence about the text, such as "FILE is ...".
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error if isinstance(error, ValueError) else 'nested too deeply'})") from None


def read_object(file: Path) -> dict[str, Any]:
    """Reads a file that contains a JSON object.

    Raises UserError if it contains something else, is a folder or may not be read, and OSError if it does not exist or
    the disk fails.
    """
    try:
        value = parse_json(file.read_bytes())
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} does not contain a JSON object")
    return value


def well_formed(text: str) -> str:
    """Replaces each unpaired surrogate by "?": JSON can express one, UTF-8 can't."""
    return text.encode(errors="replace").decode()
