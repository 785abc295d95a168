"""What one record holds: a document, as its text or as its ids."""

import functools
from typing import Any

import numpy as np

from src.data.readers import documents
from src.errors import UserError


def document(record: bytes, record_format: str, column: str) -> str | np.ndarray:
    """The document in a record.

    Args:
        record: as it is stored.
        record_format: example (a tf.train.Example), json (an object) or text (UTF-8), as `array_record_format` has it.
        column: the field that has the document; a text has none.

    Returns:
        Its text, or its ids as int32 [n].

    Raises:
        ValueError: the record is of another format, or has no such field, or neither a text nor ids in it. The message
            goes on after the name of the record.
        UserError: what reads a tf.train.Example is not installed.
    """
    match record_format:
        case "text":
            return _text(record)
        case "json":
            return documents.from_json(record, column)
        case _:
            return documents.from_fields(_features(record), column, _from_feature)


def _features(record: bytes) -> Any:
    """The features of a tf.train.Example by their names."""
    from google.protobuf.message import DecodeError

    try:
        return _example_message().FromString(record).features.feature
    except DecodeError:
        raise ValueError(
            f"it is no tf.train.Example, but {record[:80]!r}: array_record_format says what a record is"
        ) from None


@functools.cache
def _example_message() -> Any:
    """The class tf.train.Example, as TFDS has it without TensorFlow."""
    try:
        from tensorflow_datasets.proto import tf_example_pb2
    except ImportError as error:
        raise UserError(
            f"what reads a tf.train.Example, {error.name}, is not installed: bash setup.sh data installs it"
        ) from error
    return tf_example_pb2.Example


def _from_feature(feature: Any) -> str | np.ndarray:
    kind = feature.WhichOneof("kind") or "int64_list"  # a list of nothing may be stored as none at all
    values = getattr(feature, kind).value
    if kind != "bytes_list":
        return documents.as_ids(np.array(values))
    if len(values) != 1:
        raise ValueError(f"it has {len(values)} texts: expected one, or a list of ids")
    return _text(values[0])


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error.reason}), but {data[:40]!r}: {documents.EXPECTED}") from None
