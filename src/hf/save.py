"""Writes a model's weights as a Hugging Face folder, which transformers loads."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from src.errors import UserError, first_few
from src.hf.family import Family
from src.hf.folder import INDEX, SINGLE
from src.hf.load import progress
from src.hf.safetensors import write_header
from src.hf.tensor_map import Piece, WeightPath, lay_out
from src.model.params import dotted

SHARD_BYTES = 5_000_000_000


def save_folder(
    path: Path,
    family: Family,
    hf: Mapping[str, Any],
    weights: Mapping[WeightPath, np.ndarray],
    vocab_size: int,
    dtype: np.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and the safetensors files; one tensor beside `weights` is in memory at a time.

    `hf` is config.json but for the names of the family and of the tensors' dtype, and no padding. `weights` are all of
    the model's, the embedding with padding below `vocab_size` rows. Tensors are in `dtype`, or in their weights' own; a
    file has at most `shard_bytes`, but for a single tensor that is larger. Raises UserError if the family has no such
    weights, or `dtype` does not hold their values.
    """
    shapes = {weight: array.shape for weight, array in weights.items()}
    by_file: dict[str, list[Piece]] = {}
    for piece in lay_out(family.tensors, shapes, vocab_size, family.architecture, family.copied):
        by_file.setdefault(piece.file, []).append(piece)
    file_shapes = {name: pieces[0].rearrangement.file_shape for name, pieces in by_file.items()}
    dtypes = {
        # A correction bias moves in steps that a narrow type would lose.
        name: weights[pieces[0].weight].dtype if dtype is None or "correction_bias" in pieces[0].weight else dtype
        for name, pieces in by_file.items()
    }
    _check_range(weights, {pieces[0].weight: dtypes[name] for name, pieces in by_file.items()})
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in file_shapes.items()}
    largest = max(sizes, key=sizes.__getitem__)
    names = {"architectures": [family.architecture], "model_type": family.model_type, "pad_token_id": None}
    _write_json(path / "config.json", {**names, **hf, "torch_dtype": dtypes[largest].name})

    shards = _shards(sizes, shard_bytes)
    count = len(shards)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = [SINGLE]
    else:
        file_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(path / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of})
    for file, shard in zip(files, shards, strict=True):
        with open(path / file, "wb") as opened:
            write_header(opened, {name: (dtypes[name], file_shapes[name]) for name in shard})
            for name in progress(shard, f"writing {file}"):
                pieces = by_file[name]
                tensor = np.empty(file_shapes[name], weights[pieces[0].weight].dtype)
                for piece in pieces:
                    piece.write(weights[piece.weight], tensor)
                opened.write(tensor.astype(dtypes[name], copy=False).reshape(-1).view(np.uint8))


def _check_range(weights: Mapping[WeightPath, np.ndarray], dtypes: Mapping[WeightPath, np.dtype]) -> None:
    """Raises UserError where a value would become infinite in its dtype of the file: float16's range is small."""
    largest = float(np.finfo(np.float16).max)
    wide = [path for path in weights if dtypes.get(path) == np.float16 and weights[path].dtype != np.float16]
    over = [dotted(path) for path in wide if weights[path].max() > largest or weights[path].min() < -largest]
    if over:
        raise UserError(
            f"dtype=float16 holds values up to {largest:,.0f}, and these weights have larger ones: {first_few(over)}. "
            "Give dtype=bfloat16 or float32."
        )


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
