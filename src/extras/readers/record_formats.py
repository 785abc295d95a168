"""Reads the document in a stored record: JSON, a tf.train.Example or a bare value."""

from typing import Any

import numpy as np

from src.data.readers.fields import EXPECTED, as_ids, from_fields, from_json
from src.data.readers.records import Content


def read_record(record: bytes, record_format: str, column: str) -> Content | None:
    """Reads the document in a stored record; None if its field is null.

    `record_format` is example (a tf.train.Example), json (an object) or text (UTF-8), as `array_record_format` has it;
    `column` is the field that has the document. Raises ValueError, which continues a sentence that begins with the
    record's name, where there is none.
    """
    if record_format == "text":
        return _text(record)
    return (from_json if record_format == "json" else _from_example)(record, column)


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
        raise ValueError(f"it is not UTF-8 ({error.reason}), but {data[:40]!r}: {EXPECTED}") from None
