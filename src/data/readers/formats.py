"""Recognises data that are not text by the first bytes of a file."""

import csv
import io
import itertools
import os
import re

HEAD_BYTES = 1 << 16
JSON_LINES = "has JSON lines: rename it to end with .jsonl"
JSON_OBJECT = "is a JSON object, which is read as a line of a file whose name ends with .jsonl"
_COMPRESSED, _UTF_16 = "is compressed: unpack it first", "is UTF-16: convert it by iconv -f UTF-16 -t UTF-8"
_TABLE = "is a table: docs/data.md has a command that writes its rows as a .jsonl file"
_OTHER_TYPES = re.compile(r"\.(array_?record|parquet|tfrecord)")  # in names
# First bytes, and the rest of a sentence about a file that has them.
_MAGIC = {
    b"PAR1\x15": "is Parquet: set dataset_type=parquet",
    b"ARROW1\0": "is Arrow: write it as Parquet, and set dataset_type=parquet",
    b"SQLite format 3": "is an SQLite database: docs/data.md has a dataset_factory that reads one",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), _UTF_16),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\3\4", b"7z\xbc\xaf"), _COMPRESSED),
}
_STRING = r'"(?:[^"\\]|\\.)*"'
# An object, maybe after nulls; strings in brackets; numbers, if there are eight or more brackets than in "[1, 2] have
# shown".
_JSON = re.compile(
    rf"[\[\s]*(?:null\s*,\s*)*\{{\s*(?:{_STRING}\s*:|\}})|\[[\[\s]*{_STRING}\s*[],]"
    r"|\[\s*(?:-?\d[\d.]*\s*,\s*){8}|\[\s*\[\s*\d"
)
_HEADING = re.compile(r"[^\W\d][\w .()/-]{0,40}(?<! )")  # of a column
_ROWS = 10  # of a table that are looked at


def other_format(file: str, data: bytes) -> str:
    """Says which other format a file is in, by its name and by `data` at its beginning, and what to do; "" for text."""
    if kind := _OTHER_TYPES.search(os.path.basename(file)):
        return f"is data of type {kind[1]}, not text"
    if magic := next(filter(data.startswith, _MAGIC), None):
        return _MAGIC[magic]
    text = data.decode("utf-8-sig", errors="ignore").lstrip()
    if _JSON.match(text):
        if text[0] == "[":
            return "is a JSON array: docs/data.md has a command that writes its elements as a .jsonl file"
        return JSON_LINES if "\n{" in text else JSON_OBJECT
    heading = text.partition("\n")[0]
    is_table = any(delimiter in heading and _is_table(text, delimiter) for delimiter in ",\t;")
    return _TABLE if is_table or file.lower().endswith((".csv", ".tsv")) else ""


def _is_table(text: str, delimiter: str) -> bool:
    """Says whether the first rows have equally many fields, two or more, under a row of different column names."""
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    heading, *rows = [*itertools.islice(lines, _ROWS)] or [[]]
    complete = rows[:-1] or rows  # the bytes at hand may end within the last one
    named = heading[1:] if heading[:1] == [""] else heading  # pandas leaves out the name of its index
    is_heading = len(set(heading)) == len(heading) > 1 and all(map(_HEADING.fullmatch, named))
    return is_heading and bool(rows) and all(len(row) == len(heading) for row in complete)
