"""A Hugging Face model folder: its config.json, and the tensors of its safetensors files, read by slices.

A safetensors file is eight bytes that give the length of a JSON header, the header, which gives each tensor's dtype,
shape and place, and the tensors' bytes, row-major and little-endian (github.com/huggingface/safetensors, "Format").
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from src.errors import UserError
from src.hf.quantized import dequantized

Index = tuple[slice, ...]  # a slice with start and stop for each dim

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# A safetensors header's name of a dtype -> numpy's.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
# Any other, such as an int64 table of positions: a weight has none of them.
UNREADABLE = np.dtype("V1")


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
    stored: dict[str, Tensor] = {}
    for file in _weight_files(path):
        stored.update(_stored_tensors(file))
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
    return _read_json(file)


def _weight_files(path: Path) -> list[Path]:
    """The folder's safetensors files."""
    if (path / INDEX).is_file():
        placed = _read_json(path / INDEX).get("weight_map")
        if not isinstance(placed, dict):
            raise UserError(f'{path / INDEX} has no "weight_map", which says what tensor is in which file')
        files = [path / name for name in sorted(set(placed.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise UserError(f"{path} lacks {', '.join(missing)}, which its {INDEX} names: fetch the whole folder")
        return files
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    pickled = sorted(file.name for file in path.glob("*.bin"))
    has = f"only {', '.join(pickled)}, pickled by PyTorch" if pickled else "neither"
    raise UserError(
        f"{path} has {has}: expected {SINGLE}, or {INDEX} and the files it names"
        + ("; transformers' save_pretrained(..., safe_serialization=True) writes them" if pickled else "")
    )


def _stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name.

    Raises:
        UserError: the file is truncated or is not a safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        start = 8 + header_size
        if start > size:
            raise UserError(f"{file} is truncated, or no safetensors file: {size} bytes end in its header")
        try:
            header = dict(json.loads(opened.read(header_size)).items())
        except (ValueError, AttributeError):
            raise UserError(f"{file} is no safetensors file: its header is not JSON that names tensors") from None
    header.pop("__metadata__", None)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size:
        raise UserError(f"{file} is truncated: it has {size} bytes, its header describes {end}. Fetch it again.")
    return {
        name: StoredTensor(
            file, start + entry["data_offsets"][0], tuple(entry["shape"]), DTYPES.get(entry["dtype"], UNREADABLE)
        )
        for name, entry in header.items()
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object")
    return value
