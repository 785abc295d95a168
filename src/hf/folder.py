"""A Hugging Face model folder: its config.json, and the tensors of its safetensors files, read by slices.

A safetensors file is eight bytes that give the length of a JSON header, the header, which gives each tensor's dtype,
shape and place, and the tensors' bytes, row-major and little-endian (github.com/huggingface/safetensors, "Format").
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from src.errors import UserError, first_few
from src.hf.quantized import dequantized
from src.json_text import parse_json

Index = tuple[slice, ...]  # a slice with start and stop for each dim

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# A safetensors header's name of a dtype -> numpy's.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}
# Any other, such as an int64 table of positions: a weight has none of them.
UNREADABLE = np.dtype("V1")

MAX_HEADER_BYTES = 100_000_000  # the format's own bound


class Tensor(Protocol):
    """A tensor on disk; where it is stored in fewer bits, with the shape and dtype it is read with."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        """A copy of the part at `index`."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a file; only what `read` returns of it comes into memory."""

    file: Path
    offset: int  # bytes from the file's start
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        """A copy of the part at `index`."""
        stored = np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape)
        return np.array(stored[index])


@dataclass(frozen=True)
class HfFolder:
    """What is in a model folder: config.json, and every tensor by its name."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def is_hf_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a Hugging Face model folder, whole or not, at `path`."""
    folder = Path(path).expanduser()
    return folder.is_dir() and ((folder / "config.json").is_file() or any(folder.glob("*.safetensors")))


def open_folder(path: str | os.PathLike[str]) -> HfFolder:
    """The folder's config and tensors; of the files of weights, only headers are read.

    Raises:
        UserError: there is no config.json, no safetensors file or not all of them; a file is truncated or damaged;
            the weights are quantised in a format that is not read.
    """
    path = Path(path).expanduser()
    config = read_config(path)
    stored: dict[str, StoredTensor] = {}
    placed, files = _weight_files(path)
    for name in files:
        tensors = _stored_tensors(path / name)
        for tensor in tensors:
            if placed.setdefault(tensor, name) != name:
                raise UserError(
                    f"{path / name} has the tensor {tensor}, which is in {placed[tensor]} or which {INDEX} places "
                    "there: fetch the whole folder again"
                )
        stored.update(tensors)
    return HfFolder(path, config, dequantized(stored, config.get("quantization_config") or {}, path))


def read_config(path: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            f"there is no {file}: expected a Hugging Face model folder, with config.json and model*.safetensors"
        )
    return read_json(file)


def _weight_files(path: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the file of each tensor, as far as an index tells, and the names of the folder's safetensors files."""
    if (path / INDEX).exists():
        placed = read_json(path / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise UserError(f'{path / INDEX} has no "weight_map", which says what tensor is in which file')
        for tensor, name in placed.items():
            if not isinstance(name, str):
                raise UserError(f"{path / INDEX} places {tensor} in {name!r}: expected the name of a file")
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise UserError(f"{path / INDEX} places {tensor} in {name}, which is outside the folder")
        files = sorted(set(placed.values()))
        if missing := [name for name in files if not os.path.isfile(path / name)]:
            raise UserError(f"{path} lacks {first_few(missing)}, which its {INDEX} names: fetch the whole folder")
        return placed, files
    if (path / SINGLE).is_file():
        return {}, [SINGLE]
    pickled = sorted(file.name for file in path.glob("*.bin"))
    has = f"only {first_few(pickled)}, pickled by PyTorch" if pickled else "neither"
    raise UserError(
        f"{path} has {has}: expected {SINGLE}, or {INDEX} and the files it names"
        + ("; transformers' save_pretrained(..., safe_serialization=True) writes them" if pickled else "")
    )


def _stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name.

    Raises:
        UserError: the file is truncated, is no safetensors file, or its header contradicts itself.
    """
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
    if start + end > size:
        raise UserError(
            f"{file} is truncated: it has {size} bytes, its header describes {start + end}. Fetch it again."
        )
    if start + end < size:
        raise UserError(f"{file} is damaged: it has {size - start - end} bytes after its last tensor. Fetch it again.")
    return {name: StoredTensor(file, start + first, shape, dtype) for name, (first, _, dtype, shape) in tensors.items()}


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: there is none.
    """
    try:
        value = parse_json(file.read_bytes())
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object")
    return value
