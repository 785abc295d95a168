"""Reads TFRecord files by record number, with an index that is built once and saved.

A record is its length (8 bytes), a CRC of the length (4), the data, and a CRC of the data (4), so finding record i
requires all earlier ones. The index, int64 [records + 1], has each record's start, and the file's size; it is saved in
~/.cache/mintext/tfrecord, or below XDG_CACHE_HOME.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from src.data.readers import files
from src.system.disk import new_file
from src.system.errors import UserError, show

_CHUNK_BYTES, _SAMPLE_BYTES = 1 << 23, 1 << 12


class TfRecordReader:
    """Reads the file `name`, stored at `place`, by its index in `starts`; several threads may use it concurrently."""

    def __init__(self, starts: Mapping[str, np.ndarray], name: str, place: str) -> None:
        self._file, self._starts = place, starts[name]

    def read(self, first: int, stop: int) -> list[bytes]:
        """Reads the records [first, stop); raises UserError if a CRC does not match."""
        return [self._record(*map(int, self._starts[number : number + 2])) for number in range(first, stop)]

    def _record(self, start: int, stop: int) -> bytes:
        record = files.read(self._file, start, stop)
        if not _is_header(record[:12], stop - start) or _crc(record[12:-4]) != record[-4:]:
            raise UserError(
                f"{self._file}, byte {start}: the record's CRC does not match: the file is damaged, or other records "
                f"were put there since it was indexed (then delete {_cache()})"
            )
        return record[12:-4]


def indices(names: Sequence[str], sizes: Sequence[int]) -> list[np.ndarray]:
    """Returns each file's index, int64 [records + 1]: where its records begin, and the size of the file, in bytes.

    Reads a whole file once, and saves its index in the user's cache folder if that is writable. `sizes` are in bytes.
    Raises UserError for a truncated or damaged file, and as `files.read` does.
    """
    index_files = files.in_threads(_index_file, names, sizes)
    if missing := sum(not path.exists() for path in index_files):
        show(f"indexing {missing:,} TFRecord files once, saved in {index_files[0].parent}")
    return files.in_threads(_index, names, sizes, index_files)


def _index_file(file: str, size: int) -> Path:
    ends = files.read(file, 0, _SAMPLE_BYTES) + files.read(file, max(size - _SAMPLE_BYTES, 0), size)
    name = hashlib.sha256(f"{file} {size} ".encode() + ends).hexdigest()[:32]
    return _cache() / f"{name}.npy"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mintext" / "tfrecord"


def _index(file: str, size: int, index_file: Path) -> np.ndarray:
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing, not an array, or empty
        return np.load(index_file, mmap_mode="r")
    starts, at, begin, chunk = [], 0, 0, b""
    while at < size:
        if at + 12 > begin + len(chunk):
            begin, chunk = at, files.read(file, at, at + _CHUNK_BYTES)
        header = chunk[at - begin : at - begin + 12]
        starts.append(at)
        at += 16 + int.from_bytes(header[:8], "little")
        if not _is_header(header, at - starts[-1]) or at > size:
            raise UserError(
                f"{file} is not a complete TFRecord file (record {len(starts) - 1}, byte {starts[-1]}): restore it"
            )
    index = np.array([*starts, size], np.int64)
    with contextlib.suppress(OSError):  # the cache may not be writable
        index_file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(index_file) as opened:
            np.save(opened, index)
    return index


def _is_header(header: bytes, record_bytes: int) -> bool:
    """Tests whether 12 bytes are the length field of a record of `record_bytes` bytes in all, and the field's CRC."""
    return header[:8] == (record_bytes - 16).to_bytes(8, "little") and _crc(header[:8]) == header[8:]


def _crc(data: bytes) -> bytes:
    """Computes the masked CRC-32C of TensorFlow's record_writer.h."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
