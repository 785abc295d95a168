"""Finds stored records by number, and reads the document in one: JSON, a tf.train.Example or a bare value."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from src.system.errors import first_few, say
from src.system.json_text import parse_json, well_formed

Content = str | np.ndarray  # of a document: its text, or its ids as int32 [n]

_EXPECTED = "expected a text, or a list of ids"


class Index:
    """Finds the group of an item, of consecutive groups with these counts of items, such as the records of files."""

    def __init__(self, counts: Sequence[int] | np.ndarray) -> None:
        # int64 [groups + 1]: how many items there are before each group, and in all.
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, i: int) -> tuple[int, int]:
        """Returns the group of item `i`, and the item's number in the group."""
        group = int(np.searchsorted(self.starts, i, side="right")) - 1
        return group, i - int(self.starts[group])


class Nulls:
    """Has null documents of a source be empty, and prints how many were read at the first, tenth, ..."""

    def __init__(self, setting: str) -> None:
        self._setting, self._counts = setting, itertools.count(1)

    def __call__(self, document: Content | None) -> Content:
        """Returns a document, or if it is null an empty text; threads may call it."""
        if document is not None:
            return document
        if str(count := next(self._counts)).strip("0") == "1":
            say([f"{self._setting}: null documents read so far, as empty ones: {count:,}"])
        return ""


def read_record(record: bytes, record_format: str, column: str) -> Content | None:
    """Reads the document in a stored record; None if its field is null.

    `record_format` is example (a tf.train.Example), json (an object) or text (UTF-8), as `array_record_format` has it;
    `column` is the field that has the document. Raises ValueError, which continues a sentence that begins with the
    record's name, where there is none.
    """
    if record_format == "text":
        return _text(record)
    return (from_json if record_format == "json" else _from_example)(record, column)


def from_json(data: bytes, column: str) -> Content | None:
    """Reads the document in a field of a JSON object, None if it is null; raises ValueError where there is none."""
    fields = parse_json(data)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {data[:80]!r}")
    return from_fields(fields, column, as_document)


def from_fields(fields: Mapping[str, Any], column: str, read: Callable[[Any], Content]) -> Content | None:
    """Returns `read` of a field, None if it is null; raises ValueError where `read` does, or there is no field."""
    if column not in fields:
        fields_listed = first_few(sorted(map(str, fields)), near=column) or "none"
        raise ValueError(f"it has no field {column}. Its fields: {fields_listed}")
    try:
        return None if fields[column] is None else read(fields[column])
    except ValueError as error:
        raise ValueError(f"its field {column}: {error}") from None


def as_document(value: Any, vocab_size: int = 1 << 31) -> Content:
    """Converts a text, or a list or an array of ids, to a text or int32 [n]; raises ValueError for anything else."""
    if isinstance(value, str):
        return well_formed(value)
    if not isinstance(value, (list, tuple)) and not hasattr(value, "__array__"):
        raise ValueError(f"it is of type {type(value).__name__}: {_EXPECTED}")
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


def _from_example(record: bytes, column: str) -> Content | None:
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2  # which is there without TensorFlow

    try:
        features = tf_example_pb2.Example.FromString(record).features.feature
    except DecodeError:
        raise ValueError(
            f"it is no tf.train.Example, but {record[:80]!r}: array_record_format says what a record is"
        ) from None
    return from_fields(features, column, _from_feature)


def _from_feature(feature: Any) -> Content:
    kind = feature.WhichOneof("kind") or "int64_list"  # a list of nothing may be stored as none at all
    values = getattr(feature, kind).value
    if kind != "bytes_list":
        return as_ids(np.array(values))
    if len(values) != 1:
        raise ValueError(f"it has {len(values)} texts: expected one, or a list of ids")
    return _text(values[0])


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error.reason}), but {data[:40]!r}: {_EXPECTED}") from None
