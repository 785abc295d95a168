"""Distinguishes text files from other formats, by their names and their first bytes."""

import csv
import io
import itertools
import os
import re

from src.data.readers import files, find_files
from src.data.readers.files import is_jsonl
from src.data.rules import PRESENT_RULES
from src.system.errors import UserError

EXPECTED = (
    "dataset_type=text reads UTF-8, and each line of a .jsonl file as an object with a text; a glob leaves other files "
    "out, as in dataset_path='FOLDER/**/*.txt'"
)
# Files found next to texts in a folder: pictures, patches, and single JSON objects, such as settings and notebooks.
_BESIDE_TEXT = re.compile(r".*\.(svg|png|jpe?g|gif|webp|ico|diff|patch|json|ipynb)", re.IGNORECASE)
HEAD_BYTES = 1 << 16  # read from a file to recognise other formats
JSON_LINES = "has JSON lines: rename it to end with .jsonl"
JSON_OBJECT = "is a JSON object, which is read as a line of a file whose name ends with .jsonl"
_COMPRESSED, _UTF_16 = "is compressed: unpack it first", "is UTF-16: convert it by iconv -f UTF-16 -t UTF-8"
_TABLE = "is a table: docs/data.md has a command that writes its rows as a .jsonl file"
_OTHER_TYPES = re.compile(r"\.(array_?record|parquet|tfrecord)")  # in names
# First bytes of a file, and the end of a sentence about such a file.
_MAGIC = {
    b"PAR1\x15": "is Parquet: set dataset_type=parquet",
    b"ARROW1\0": "is Arrow: write it as Parquet, and set dataset_type=parquet",
    b"SQLite format 3": "is an SQLite database: docs/data.md has a dataset_factory that reads one",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), _UTF_16),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\3\4", b"7z\xbc\xaf"), _COMPRESSED),
}
_STRING = r'"(?:[^"\\]|\\.)*"'
# An object, maybe after nulls; strings in brackets; eight or more numbers in brackets, or nested brackets, unlike
# "[1, 2] have shown".
_JSON = re.compile(
    rf"[\[\s]*(?:null\s*,\s*)*\{{\s*(?:{_STRING}\s*:|\}})|\[[\[\s]*{_STRING}\s*[],]"
    r"|\[\s*(?:-?\d[\d.]*\s*,\s*){8}|\[\s*\[\s*\d"
)
_HEADING = re.compile(r"[^\W\d][\w .()/-]{0,40}(?<! )")  # a column's name
_ROWS = 10  # checked to recognise a table


def list_text_files(path: str, key: str, rules: int = PRESENT_RULES) -> files.Listing:
    """Lists the text files of a path; raises UserError for data of another type, and as `list_files` does."""
    listing, setting = find_files.list_files(path, key, rules), f"{key}={path}"
    for name in listing.sizes:
        folder, file = os.path.split(name)
        if file == "dataset_info.json" and os.path.join(folder, "features.json") in listing.sizes:
            place = os.path.join(listing.folder, folder).rstrip("/")
            raise UserError(
                f"{setting}: {place} is a TFDS dataset (dataset_info.json, features.json): data of type tfds, "
                f"not text. {EXPECTED}"
            )
    return _only_text(listing) if rules > 1 else listing


def _only_text(listing: files.Listing) -> files.Listing:
    """Leaves out files of a folder that by their names are not texts; raises UserError if another is not text."""
    listing = listing.only(lambda name: True)  # drops only the markers that no reader reads
    about_data, beside = (set(filter(names.fullmatch, listing.sizes)) for names in (files.ABOUT_DATA, _BESIDE_TEXT))
    is_mixed = listing.is_whole and listing.sizes.keys() > about_data | beside
    is_remote = files.is_remote(listing.folder)  # each head would be a request: check files when they are read
    for name, file in zip(listing.sizes, listing.paths, strict=True):
        head = files.read(file, 0, HEAD_BYTES) if not is_remote or name.endswith(".json") else b""
        fits = ["", *[JSON_LINES, JSON_OBJECT] * is_jsonl(name), *[JSON_OBJECT] * (is_mixed and name in beside)]
        if (answer := other_format(file, head)) not in fits:
            raise UserError(f"{listing.setting}: {file} {answer}. {EXPECTED}")
    passed = beside | about_data if any(map(is_jsonl, listing.sizes)) else beside
    return listing.only(lambda name: name not in passed)


def other_format(file: str, data: bytes) -> str:
    """Explains by a file's name and first bytes `data` that it has another format, and what to do; "" for text."""
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
    """Tells whether the first rows have equally many fields, two or more, under a row of distinct column names."""
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    heading, *rows = [*itertools.islice(lines, _ROWS)] or [[]]
    complete = rows[:-1] or rows  # the available bytes may end inside the last row
    named = heading[1:] if heading[:1] == [""] else heading  # pandas leaves its index unnamed
    is_heading = len(set(heading)) == len(heading) > 1 and all(map(_HEADING.fullmatch, named))
    return is_heading and bool(rows) and all(len(row) == len(heading) for row in complete)
