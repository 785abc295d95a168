"""Reads documents from ArrayRecord files: `dataset_type=array_record`, and the files of TFDS.

An ArrayRecord file is a Riegeli file of chunks, each with one record or a group of them; then a footer, itself a chunk,
with a metadata record and one record per chunk; then a block of 64 KiB with the footer's position. A file's reader
keeps each chunk's position in memory, 8 bytes per chunk. The package reads local files, and files on gs:// with one
request per record; a small dataset on gs:// is copied to this machine first.

The package's own ArrayRecordDataSource is not used: it keeps every file open, opens each to count its records, and
scans all chunks of a file to read one record (docs/log.md has figures).
"""

import functools
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from src.config.dataset_spec import DatasetSpec
from src.data.readers import files, find_files
from src.data.readers.fields import EXPECTED, as_ids, from_fields, from_json
from src.data.readers.records import Content, Index, Nulls
from src.data.rules import PRESENT_RULES
from src.data.types import Fingerprint, InputSpec, Source
from src.extras.readers import remote_files
from src.system.errors import UserError
from src.system.storage_errors import attempted

_NAME = re.compile(r"array_?record", re.IGNORECASE)

# Riegeli files: a 24-byte header interrupts the data at each multiple of 64 KiB.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_FIRST_CHUNK = _BLOCK_HEADER + _CHUNK_HEADER  # after the file's signature, which is a chunk without data
# The postscript, a protocol buffer: field 1 is the footer's position, field 2 a number that marks ArrayRecord.
_POSTSCRIPT = re.compile(rb"\x08([\x80-\xff]*[\x00-\x7f])\x10\xde\xc0\xeb\xfe\x84\xce\xc3\xc9\x71", re.DOTALL)

# A remote dataset of at most this size is copied to this machine; otherwise each record is a request.
COPIED_BYTES = 1 << 28
_MAX_OPEN_FILES = 2048


class RecordRange(NamedTuple):
    """The records [first, first + count) of a file."""

    file: str
    first: int
    count: int


class RecordSource(Source):
    """Reads documents from the records of ArrayRecord files.

    The first record is read immediately, so that unsuitable data fails at startup. Each file is opened on
    first use, by `open_file(file, path)`, in which `path` may be a local copy; a limited number are open at a time.
    `parts` are the ranges of records, in order; `record_format` is as in `read_record`; `fingerprint` identifies the
    dataset. Raises UserError if the first record can't be read, TransientError if a store fails.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        parts: list[RecordRange],
        record_format: str,
        listing: files.Listing,
        fingerprint: Fingerprint,
        open_file: Callable[[str, str], Any],
    ) -> None:
        self._format, self._column = record_format, spec.dataset_column
        self._column_setting, self.listings = spec.setting("dataset_column"), [listing]
        self._nulls = Nulls(self._column_setting)
        self._parts, self._index = parts, Index([part.count for part in parts])
        self.is_remote = files.is_remote(listing.folder)
        places: dict[str, str] = {}  # paths of copies, by the files' names
        if self.is_remote and sum(listing.sizes.values()) <= COPIED_BYTES:
            self._copies, self.is_remote = remote_files.LocalCopies(), False
            copied = files.in_threads(self._copies.path, listing.paths, listing.sizes.values())
            places = dict(zip(listing.paths, copied, strict=True))
        self._fingerprint = {**fingerprint, "records": len(self), "column": self._column}
        self._reader = functools.lru_cache(_open_files_allowed())(lambda file: open_file(file, places.get(file, file)))
        self[0]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> str | np.ndarray:
        place, offset = self._index.find(i)
        file, first, _ = self._parts[place]
        number = first + offset
        reader, damaged = self._reader(file), "can't be read, the file is damaged"
        # A range is found directly; for a list of numbers the package scans all chunks of the file.
        (record,) = attempted(f"{file}, record {number}", lambda: reader.read(number, number + 1), damaged)
        try:
            return self._nulls(read_record(record, self._format, self._column))
        except ValueError as error:
            setting = "" if self._format == "text" else f" ({self._column_setting})"
            raise UserError(f"{file}, record {number}: {error}{setting}") from error

    def fingerprint(self) -> Fingerprint:
        return {**self._fingerprint, **self.listings[0].fingerprint}


class ArrayRecordSource(RecordSource):
    """Reads the records of ArrayRecord files by file name; in a folder, only files with array_record in their names.

    Raises UserError if ArrayRecord files are absent, one of a numbered set is missing or damaged, all are empty, or the
    first record is not as `array_record_format` and `dataset_column` say; also as `check_store` and `list_files` do.
    """

    def __init__(self, spec: DatasetSpec, rules: int = PRESENT_RULES) -> None:
        check_store(spec)
        listing = find_files.list_files(spec.dataset_path, spec.key("dataset_path"), rules)
        setting, none = spec.setting("dataset_path"), "has no ArrayRecord file: no file with array_record in its name"
        if listing.is_whole and any(Path(name).name == "dataset_info.json" for name in listing.sizes):
            raise UserError(
                f"{setting} has a TFDS dataset (dataset_info.json), perhaps with several splits: dataset_type=tfds "
                "reads it, and a glob such as FOLDER/*-train.array_record* selects one split's files"
            )
        listing = listing.only(_NAME.search)
        if not listing.sizes:
            raise UserError(f"{setting} {none}. Use a glob for other names")
        counts = files.in_threads(count_records, listing.paths, listing.sizes.values())
        if not sum(counts):
            raise UserError(f"{setting}: the {len(counts)} ArrayRecord files have no records")
        ranges = [RecordRange(file, 0, count) for file, count in zip(listing.paths, counts, strict=True)]
        fingerprint: Fingerprint = {"type": "array_record", "format": spec.array_record_format}
        super().__init__(spec, ranges, spec.array_record_format, listing, fingerprint, open_reader)


def check_store(spec: DatasetSpec) -> None:
    """Raises UserError for a store other than Cloud Storage, which the package array_record can't read."""
    if files.is_remote(spec.dataset_path) and not spec.dataset_path.startswith("gs://"):
        raise UserError(
            f"{spec.setting('dataset_path')}: ArrayRecord files are read from gs:// and from this machine's file "
            "system. Mount the bucket or copy the files, and give that folder"
        )


def open_reader(file: str, place: str) -> Any:
    """Opens a reader of `file`, stored at `place`, that several threads may use at once; raises as `attempted` does."""
    from array_record.python.array_record_module import ArrayRecordReader

    def opened() -> ArrayRecordReader:
        reader = ArrayRecordReader(place, "readahead_buffer_size:0,max_parallelism:0", file_reader_buffer_size=1 << 15)
        if not reader.ok():
            reader.close()  # raises the reason
        return reader

    return attempted(file, opened, "is not a complete ArrayRecord file: restore it, or leave it out")


def count_records(file: str, end: int) -> int:
    """Counts the records of a file of `end` bytes; raises UserError if it is incomplete.

    In files for random access each chunk has one record, and the footer's header has their number. Opening a reader
    would read the whole footer: 5 s for a hundred million records in a thousand files; this takes 0.1 s.
    """
    is_whole = end > 0 and end % _BLOCK == 0
    postscript = _POSTSCRIPT.search(files.read(file, end - _BLOCK, end - _BLOCK + 256)) if is_whole else None
    if postscript and _chunk_records(file, _FIRST_CHUNK) == 1:
        footer = sum((byte & 0x7F) << 7 * n for n, byte in enumerate(postscript[1]))
        if in_footer := _chunk_records(file, footer):
            return in_footer - 1
    return open_reader(file, file).num_records()


def _chunk_records(file: str, at: int) -> int:
    """Counts the records in the chunk that begins at byte `at` of a file; 0 if none begins there."""
    header = files.read(file, at, at + _BLOCK_HEADER + _CHUNK_HEADER)
    block = -at % _BLOCK  # offset of the next block header
    if block < _CHUNK_HEADER:
        header = header[:block] + header[block + _BLOCK_HEADER :]
    return int.from_bytes(header[25:32], "little") if header[24:25] == b"r" else 0


def _open_files_allowed() -> int:
    """Returns how many files a source may keep open: 2,048, or a quarter of the process's hard limit if that is less.

    Raises the process's soft limit to four times that, if it is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 4 * _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 4 * _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit // 4


# ---- The document in a record: JSON, a tf.train.Example or a bare value


def read_record(record: bytes, record_format: str, column: str) -> Content | None:
    """Reads the document in a stored record; None if its field is null.

    `record_format` is a value of `array_record_format`: example (a tf.train.Example), json (an object) or text (UTF-8);
    `column` is the field that has the document. Raises ValueError if there is no document; its message continues a
    sentence that begins with the record's name.
    """
    if record_format == "text":
        return _text(record)
    return (from_json if record_format == "json" else _from_example)(record, column)


def _from_example(record: bytes, column: str) -> Content | None:
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2  # importable without TensorFlow

    try:
        features = tf_example_pb2.Example.FromString(record).features.feature
    except DecodeError:
        raise ValueError(
            f"it is no tf.train.Example, but {record[:80]!r}: array_record_format says what a record is"
        ) from None
    return from_fields(features, column, _from_feature)


def _from_feature(feature: Any) -> Content:
    kind = feature.WhichOneof("kind") or "int64_list"  # an empty list may be stored without its kind
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


def open_source(spec: DatasetSpec, inputs: InputSpec) -> ArrayRecordSource:
    """Opens the ArrayRecord files of `dataset_path`; raises as `ArrayRecordSource` does."""
    return ArrayRecordSource(spec, inputs.rules)
