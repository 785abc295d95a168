"""What a document is, a text or ids, and what most sources of documents have in common."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from src import json_text
from src.errors import first_few

EXPECTED = "expected a text, or a list of ids"


def as_document(value: Any, vocab_size: int = 1 << 31) -> str | np.ndarray:
    """The document that a value is: a text, or a list or an array of ids, as int32 [n].

    Raises:
        ValueError: it is neither, or the ids are not those of `as_ids`.
    """
    if isinstance(value, str):
        return well_formed(value)
    if not isinstance(value, (list, tuple)) and not hasattr(value, "__array__"):
        raise ValueError(f"it is of type {type(value).__name__}: {EXPECTED}")
    return as_ids(value, vocab_size)


def as_ids(values: Any, vocab_size: int = 1 << 31) -> np.ndarray:
    """A list or an array of ids as int32 [n].

    Raises:
        ValueError: they are no whole numbers in [0, vocab_size), or in more than one dim.
    """
    try:
        ids = np.asarray(values)
    except ValueError:
        raise ValueError("lists in it have different lengths, and one dim is expected") from None
    if ids.ndim != 1:
        raise ValueError(f"it has {ids.ndim} dims, and one is expected")
    if len(ids) and ids.dtype.kind not in "iu":
        raise ValueError(f"it has values of type {ids.dtype}, and whole numbers are expected")
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        outside = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"the id {outside} is not in the range from 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def well_formed(text: str) -> str:
    """The text with "?" for each surrogate without its pair: JSON can spell one, UTF-8 can't."""
    return text.encode(errors="replace").decode()


def from_json(data: bytes, column: str) -> str | np.ndarray:
    """The document in a field of a JSON object; raises ValueError where there is none."""
    fields = parse_json(data)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {data[:80]!r}")
    return from_fields(fields, column, as_document)


def from_fields(fields: Mapping[str, Any], column: str, read: Callable[[Any], str | np.ndarray]) -> str | np.ndarray:
    """The document that `read` makes of a field; raises ValueError where it does, or there is no such field."""
    if column not in fields:
        there = first_few(sorted(map(str, fields)), near=column) or "none"
        raise ValueError(f"it has no field {column}. Its fields: {there}")
    try:
        return read(fields[column])
    except ValueError as error:
        raise ValueError(f"its field {column}: {error}") from None


def parse_json(data: bytes) -> Any:
    """The value of a JSON text; raises ValueError where it is none."""
    try:
        return json_text.parse_json(data)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
