"""Parses JSON that somebody else wrote, so that no text makes a command end in a traceback."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Returns the value that the JSON `text` spells.

    Raises:
        ValueError: `text` is not JSON, is not UTF-8, or is nested deeper than Python's stack allows.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON nested too deeply to be read") from None
