"""Writes a model's weights as a Hugging Face folder, which transformers loads."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from src.hf.family import Family
from src.hf.folder import INDEX, SINGLE
from src.hf.load import progress
from src.hf.safetensors import write_header
from src.hf.tensor_map import Piece, WeightPath, lay_out, mtp_copies

SHARD_BYTES = 5_000_000_000

Weights = Mapping[WeightPath, np.ndarray]


def save_folder(
    path: Path,
    family: Family,
    hf: Mapping[str, Any],
    weights: Weights,
    vocab_size: int,
    dtype: np.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and the safetensors files; one tensor beside `weights` is in memory at a time.

    Args:
        path: an existing folder.
        family: the model's.
        hf: config.json, but for the names of the family and of the tensors' dtype.
        weights: all of the model's.
        vocab_size: number of the embedding's rows that are no padding.
        dtype: of the tensors; None: their weights' own.
        shard_bytes: upper bound of a file's size, but for a single tensor that is larger.

    Raises:
        UserError: the family has no such weights.
    """
    shapes = {weight: array.shape for weight, array in weights.items()}
    by_file: dict[str, list[Piece]] = {}
    for piece in [
        *lay_out(family.tensors, shapes, vocab_size, family.architecture),
        *mtp_copies(family.copied, shapes, vocab_size),
    ]:
        by_file.setdefault(piece.file, []).append(piece)
    dtypes = {
        # A correction bias moves in steps that a narrow type would lose.
        name: weights[pieces[0].weight].dtype if dtype is None or "correction_bias" in pieces[0].weight else dtype
        for name, pieces in by_file.items()
    }
    sizes = {name: math.prod(pieces[0].file_shape) * dtypes[name].itemsize for name, pieces in by_file.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    _write_json(path / "config.json", {**names, **hf, "torch_dtype": dtypes[largest].name})

    shards = _shards(sizes, shard_bytes)
    count = len(shards)
    files = (
        [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)] if count > 1 else [SINGLE]
    )
    file_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    if count > 1:
        _write_json(path / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of})
    for file, shard in zip(files, shards, strict=True):
        with open(path / file, "wb") as opened:
            write_header(opened, {name: (dtypes[name], by_file[name][0].file_shape) for name in shard})
            for name in progress(shard, f"writing {file}"):
                opened.write(_tensor(by_file[name], weights, dtypes[name]).reshape(-1).view(np.uint8))


def _tensor(pieces: Sequence[Piece], weights: Weights, dtype: np.dtype) -> np.ndarray:
    """Returns the tensor that the pieces, of one name, make up."""
    tensor = np.empty(pieces[0].file_shape, weights[pieces[0].weight].dtype)
    for piece in pieces:
        piece.write(weights[piece.weight], tensor)
    return tensor.astype(dtype, copy=False)


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(sizes):
        if shards[-1] and filled + sizes[name] > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    return shards


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
