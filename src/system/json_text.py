"""Parses JSON of unknown origin, and files with a value per line, so that no text ends in a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from src.system.errors import UserError

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Returns the value of the JSON `text`; raises ValueError if it is not JSON, not UTF-8, or too deep for Python.

    Its message continues a sentence on the text.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error if isinstance(error, ValueError) else 'nested too deeply'})") from None


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises UserError where there is none."""
    try:
        value = parse_json(file.read_bytes())
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object")
    return value


def read_lines(path: Path, key: str, of_json: Callable[[str], T]) -> list[str | T]:
    """Returns a file's lines, or `of_json` of a .jsonl file's, but empty ones; raises UserError where that fails."""
    try:
        # Editors on Windows begin files with a mark. JSON's strings may contain what `splitlines` takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}={path} cannot be read: {error}") from None
    values: list[str | T] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(of_json(line) if path.suffix == ".jsonl" else line)
        except ValueError as error:
            raise UserError(f"{key}={path}, line {number}: {error}") from None
    return values


def well_formed(text: str) -> str:
    """Replaces each surrogate without its pair by "?": JSON can spell one, UTF-8 can't."""
    return text.encode(errors="replace").decode()
