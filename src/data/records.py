"""What one record holds: a document, as its text or as its ids."""

import functools
import json
from typing import Any

import numpy as np

from src.data.text_files import well_formed
from src.errors import UserError

_EXPECTED = "expected a text, or a list of ids"


def document(record: bytes, record_format: str, column: str) -> str | np.ndarray:
    """The document in a record.

    Args:
        record: as it is stored.
        record_format: example (a tf.train.Example), json (an object) or text (UTF-8), as `array_record_format` has it.
        column: the field that has the document; a text has none.

    Returns:
        Its text, or its ids as int32 [n].

    Raises:
        UserError: the record is of another format, or has no such field, or neither a text nor ids in it. The message
            goes on after the name of the record.
    """
    match record_format:
        case "text":
            return _text(record, "it")
        case "json":
            return _from_json(record, column)
        case _:
            return _from_example(record, column)


def _from_json(record: bytes, column: str) -> str | np.ndarray:
    try:
        fields = json.loads(record)
    except ValueError as error:
        raise UserError(f"it is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"it is no JSON object, but {record[:80]!r}")
    if column not in fields:
        raise _absent(column, fields)
    value = fields[column]
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list) and all(type(each) is int for each in value):
        return _ids(np.array(value), column)
    raise UserError(f"its field {column} is {json.dumps(value)[:80]}: {_EXPECTED}")


def _from_example(record: bytes, column: str) -> str | np.ndarray:
    from google.protobuf.message import DecodeError

    try:
        fields = _example_message().FromString(record).features.feature
    except DecodeError:
        raise UserError(f"it is no tf.train.Example, but {record[:80]!r}") from None
    if column not in fields:
        raise _absent(column, fields)
    match fields[column].WhichOneof("kind"):
        case "bytes_list" if len(texts := fields[column].bytes_list.value) == 1:
            return _text(texts[0], f"its field {column}")
        case "bytes_list":
            raise UserError(f"its field {column} has {len(texts)} texts: expected one, or a list of ids")
        case "float_list":
            raise UserError(f"its field {column} has floating-point numbers: {_EXPECTED}")
        case _:  # int64_list; a list of nothing may be stored as none at all
            return _ids(np.array(fields[column].int64_list.value, np.int64), column)


@functools.cache
def _example_message() -> Any:
    """The class tf.train.Example, as TFDS has it without TensorFlow."""
    try:
        from tensorflow_datasets.proto import tf_example_pb2
    except ImportError as error:
        raise UserError(f"what reads it, {error.name}, is not installed: bash setup.sh data installs it") from error
    return tf_example_pb2.Example


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 ({error.reason}), but {data[:40]!r}: {_EXPECTED}") from None


def _ids(values: np.ndarray, column: str) -> np.ndarray:
    for value in (values.min(), values.max()) if len(values) else ():
        if not 0 <= value < 2**31:
            raise UserError(f"its field {column} has {value}: expected ids, 0 and up")
    return values.astype(np.int32)


def _absent(column: str, fields: Any) -> UserError:
    there = ", ".join(sorted(fields)) or "none"
    return UserError(f"it has no field {column}. Its fields: {there}")
