"""Reads Parquet files, with documents in one column, by row groups: `dataset_type=parquet`."""

import collections
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from src.config.dataset_spec import DatasetSpec
from src.data.readers import files, find_files
from src.data.readers.fields import as_ids
from src.data.readers.records import Index, Nulls
from src.data.rules import PRESENT_RULES
from src.data.types import Fingerprint, InputSpec, Source
from src.extras.readers import remote_files
from src.system.errors import UserError, first_few
from src.system.storage_errors import attempted

_CACHE_BYTES = 512 << 20


class ParquetSource(Source):
    """Reads the rows of Parquet files, in the order of the files' names: each a text, or a list of ids.

    Opening only reads the files' footers. Reading a row decodes the column of its row group, and the last used groups
    are cached: 512 MiB of them, or a single larger one. Threads that need the same group share one read.
    `dataset_column` has strings, in which null is an empty text, or lists of integers; `a.b` is the field `b` of the
    structs in column `a`. Raises UserError if all files are empty, or if a file is damaged, lacks the column or has
    another type for it; also raises as `list_files` does.
    """

    def __init__(self, spec: DatasetSpec, rules: int = PRESENT_RULES) -> None:
        self._column, self._column_setting = spec.dataset_column, spec.setting("dataset_column")
        self._nulls = Nulls(self._column_setting)
        listing = find_files.list_files(spec.dataset_path, spec.key("dataset_path"), rules)
        self.listings = [listing := listing.only(lambda name: not files.ABOUT_DATA.fullmatch(name))]
        self._files = list(zip(listing.paths, listing.sizes.values(), strict=True))
        rows = files.in_threads(self._count_rows, listing.paths, listing.sizes.values())
        self._groups = Index([len(counts) for counts in rows])  # the row groups of each file
        self._sizes = np.array([count for counts in rows for count in counts], np.int64)
        self._rows = Index(self._sizes)
        if not len(self._rows):
            raise UserError(f"{spec.setting('dataset_path')} has no rows: expected Parquet files with rows")
        # Columns of row groups, most recently used last.
        self._cached: collections.OrderedDict[int, pa.ChunkedArray] = collections.OrderedDict()
        self._cached_bytes = 0
        self._lock, self._reading = threading.Lock(), [threading.Lock() for _ in self._sizes]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> str | np.ndarray:
        group, row = self._rows.find(i)
        value = self._group(group)[row]
        try:
            if not isinstance(value, pa.ListScalar):
                return self._nulls(value.as_py())
            if not value.is_valid:
                self._nulls(None)
                return np.empty(0, np.int32)
            if value.values.null_count:
                raise ValueError("there is a null among the ids")
            return as_ids(value.values)
        except ValueError as error:  # includes UnicodeDecodeError
            raise UserError(f"{self._name(group)}, row {row} of the group, {self._column}: {error}") from None

    def group_sizes(self) -> np.ndarray:
        return self._sizes

    def fingerprint(self) -> Fingerprint:
        fingerprint = {"type": "parquet", "documents": len(self), "column": self._column}
        # Versions without the last entry shuffled the rows of all groups in the same order.
        return {**self.listings[0].fingerprint, **fingerprint, "order in a row group": "its own"}

    def _count_rows(self, file: str, size: int) -> list[int]:
        def read_footer() -> tuple[pa.Schema, list[int]]:
            with _open(file, size) as opened:
                groups = range(opened.metadata.num_row_groups)
                return opened.schema_arrow, [opened.metadata.row_group(number).num_rows for number in groups]

        schema, rows = attempted(file, read_footer, "can't be read as Parquet, or is damaged")
        kind = _type(schema, self._column)
        if kind is None:
            columns = first_few(schema.names, near=self._column)
            such = "several columns of this name" if schema.names.count(self._column) > 1 else "no such column"
            raise UserError(f"{self._column_setting}: {file} has {such}; it has {columns}")
        if not _is_text(kind) and not _is_ids(kind):
            raise UserError(
                f"{self._column_setting}: in {file} the column is of type {kind}; expected strings, or lists of whole "
                "numbers (ids)"
            )
        return rows

    def _group(self, group: int) -> pa.ChunkedArray:
        with self._reading[group]:
            with self._lock:
                if group in self._cached:
                    self._cached.move_to_end(group)
                    return self._cached[group]
            column = self._read_group(group)
            with self._lock:
                self._cached[group] = column
                self._cached_bytes += column.nbytes
                while len(self._cached) > 1 and self._cached_bytes > _CACHE_BYTES:
                    self._cached_bytes -= self._cached.popitem(last=False)[1].nbytes
            return column

    def _read_group(self, group: int) -> pa.ChunkedArray:
        file, number = self._groups.find(group)

        def read_column() -> pa.Table:
            with _open(*self._files[file]) as opened:
                return opened.read_row_group(number, columns=[self._column], use_threads=False)

        table = attempted(self._name(group), read_column, "can't be read, the file is damaged")
        # A struct with such a field is read too if its own name and a dot begin the name of a column.
        column = table.column(self._column if self._column in table.column_names else 0)
        while pa.types.is_struct(column.type):
            (column,) = column.flatten()
        return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column

    def _name(self, group: int) -> str:
        file, number = self._groups.find(group)
        return f"{self._files[file][0]}, row group {number}"


def _open(file: str, size: int) -> pq.ParquetFile:
    place = remote_files.open_remote(file, size) if files.is_remote(file) else file
    return pq.ParquetFile(place, page_checksum_verification=True)


def _type(schema: pa.Schema, column: str) -> pa.DataType | None:
    """Returns the type of a column, or of a field in a struct column; None if it is missing or ambiguous."""
    if schema.names.count(column) == 1:
        return schema.field(column).type
    kind: pa.Schema | pa.DataType = schema
    for name in column.split("."):
        if not (isinstance(kind, pa.Schema) or pa.types.is_struct(kind)) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    # A file with only nulls may have a column of type null.
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def _is_ids(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def open_source(spec: DatasetSpec, inputs: InputSpec) -> ParquetSource:
    """Opens the Parquet files of `dataset_path`; raises as `ParquetSource` does."""
    return ParquetSource(spec, inputs.rules)
