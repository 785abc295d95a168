"""Reads the tensors of safetensors files by slices, and writes such files' headers.

A safetensors file is eight bytes that give the length of a JSON header, the header, which gives each tensor's dtype,
shape and place, and the tensors' bytes, row-major and little-endian (github.com/huggingface/safetensors, "Format").
The package of that name reads neither bfloat16 nor float8 into numpy.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from src.errors import UserError
from src.json_text import parse_json

Index = tuple[slice, ...]  # a slice with start and stop for each dim

# A safetensors header's name of a dtype -> numpy's.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}
# For any other, such as an int64 table of positions, which no weight has.
UNREADABLE = np.dtype("V1")

MAX_HEADER_BYTES = 100_000_000  # the format's own bound


class Tensor(NamedTuple):
    """A tensor on disk: a quantised one has the shape and dtype that reading gives."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]  # copies the part at an index into memory


def open_tensors(file: Path) -> dict[str, Tensor]:
    """Returns a file's tensors by name, from its header alone; raises UserError if it is truncated or damaged."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        start = 8 + header_size
        if start > size:
            raise UserError(f"{file} is truncated, or no safetensors file: {size} bytes end in its header")
        try:
            header = parse_json(opened.read(header_size)) if header_size <= MAX_HEADER_BYTES else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise UserError(f"{file} is no safetensors file: its header is not JSON that names tensors")
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]} if all(
                type(dim) is int and dim >= 0 for dim in shape
            ):
                tensors[name] = (first, last, DTYPES.get(dtype, UNREADABLE), tuple(shape))
            case _:
                raise UserError(f"{file} is damaged: its header describes the tensor {name} as {entry!r:.200}")
    for name, (first, last, dtype, shape) in sorted(tensors.items(), key=lambda item: item[1][:2]):
        expected = last - first if dtype == UNREADABLE else math.prod(shape) * dtype.itemsize
        if first != end or last - first != expected or last < first:
            raise UserError(
                f"{file} is damaged: its header places the tensor {name} at bytes {first} to {last}, where "
                f"{end} to {end + max(expected, 0)} are next"
            )
        end = last
    if start + end != size:
        state = "truncated" if start + end > size else "damaged"
        raise UserError(f"{file} is {state}: it has {size} bytes, its header describes {start + end}. Fetch it again.")
    return {name: _stored(file, start + first, dtype, shape) for name, (first, _, dtype, shape) in tensors.items()}


def _stored(file: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> Tensor:
    def read(index: Index) -> np.ndarray:
        return np.array(np.memmap(file, dtype, mode="r", offset=offset, shape=shape)[index])

    return Tensor(shape, dtype, read)


def write_header(file: BinaryIO, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Writes what comes before the tensors' bytes, which follow in the order of `tensors` (name -> dtype, shape)."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    file.write(len(text).to_bytes(8, "little") + text)
