"""Reads documents: a text or a list of ids, maybe in a field of a JSON object."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from src.data.readers.files import line_name
from src.data.readers.records import Content
from src.system.errors import UserError, first_few
from src.system.json_text import parse_json, well_formed

EXPECTED = "expected a text, or a list of ids"


def from_line(line: bytes, column: str, file: str, start: int) -> Content | None:
    """Reads the document in the line at byte `start` of `file`; None if null. Raises UserError without a document."""
    hint = ""
    try:
        fields = _parse_object(line)
        hint = f" (dataset_column={column} names the field)"
        return from_fields(fields, column, as_document)
    except ValueError as error:
        raise UserError(f"{line_name(file, start)}: {error}{hint}") from None


def from_json(data: bytes, column: str) -> Content | None:
    """Reads the document in the field `column` of a JSON object, None if null; raises ValueError without one."""
    return from_fields(_parse_object(data), column, as_document)


def _parse_object(data: bytes) -> dict[str, Any]:
    fields = parse_json(data)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {data[:80]!r}")
    return fields


def from_fields(fields: Mapping[str, Any], column: str, read: Callable[[Any], Content]) -> Content | None:
    """Applies `read` to a field; None if it is null. Raises ValueError if `read` does, or if the field is missing."""
    if column not in fields:
        fields_listed = first_few(sorted(map(str, fields)), near=column) or "none"
        raise ValueError(f"it has no field {column}. Its fields: {fields_listed}")
    try:
        return None if fields[column] is None else read(fields[column])
    except ValueError as error:
        raise ValueError(f"its field {column}: {error}") from None


def as_document(value: Any, vocab_size: int = 1 << 31) -> Content:
    """Returns a text in valid Unicode, or a list or array of ids as int32 [n]; raises ValueError for anything else."""
    if isinstance(value, str):
        return well_formed(value)
    if not isinstance(value, (list, tuple)) and not hasattr(value, "__array__"):
        raise ValueError(f"it is of type {type(value).__name__}: {EXPECTED}")
    return as_ids(value, vocab_size)


def as_ids(values: Any, vocab_size: int = 1 << 31) -> np.ndarray:
    """Converts a list or an array of ids to int32 [n]; raises ValueError unless they are in [0, vocab_size)."""
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
