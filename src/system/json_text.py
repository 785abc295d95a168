"""Parses JSON of unknown origin, and files with a value per line, without a traceback for any text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from src.system.errors import UserError

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Parses `text`; raises ValueError if it is not JSON, not UTF-8, or nested too deeply for Python.

    The message completes a sentence about the text, such as "FILE is ...".
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error if isinstance(error, ValueError) else 'nested too deeply'})") from None


def read_object(file: Path) -> dict[str, Any]:
    """Reads a file that contains a JSON object; raises UserError if it does not."""
    try:
        value = parse_json(file.read_bytes())
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} does not contain a JSON object")
    return value


def read_lines(path: Path, key: str, of_json: Callable[[str], T]) -> list[str | T]:
    """Reads a file's lines except empty ones, mapping a .jsonl file's by `of_json`; raises UserError if that fails."""
    try:
        # Editors on Windows begin files with a byte order mark. JSON strings may contain line ends of `splitlines`.
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
    """Replaces each unpaired surrogate by "?": JSON can express one, UTF-8 can't."""
    return text.encode(errors="replace").decode()
