"""Writes a model's weights as a Hugging Face folder that transformers can load."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory

from src.extras.hf.family import Family, Json
from src.extras.hf.folder import INDEX
from src.extras.hf.load import progress
from src.extras.hf.safetensors import write_header
from src.extras.hf.tensor_map import Piece, WeightPath, lay_out
from src.model.params import dotted
from src.system.errors import UserError, first_few

FILES = "model{suffix}.safetensors"  # the suffix is empty for a single file, else like -00001-of-00002
SHARD_BYTES = 5_000_000_000


def save_folder(
    path: Path,
    family: Family,
    hf: Json,
    weights: Mapping[WeightPath, np.ndarray],
    vocab_size: int,
    dtype: np.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json, the safetensors files and, if there are several, their index.

    Tensors are written one at a time, to use little memory beside `weights`. `hf` is config.json without
    `architectures`, `model_type` and `torch_dtype`. `weights` are all of the model's weights; rows of the embedding
    beyond `vocab_size` are padding. Tensors have `dtype`, or else their weights' dtypes, which correction biases always
    keep; a file has at most `shard_bytes`, unless a single tensor is larger. Raises UserError if the family has no
    tensor for a weight, or if `dtype` is float16 and a value exceeds its range.
    """
    shapes = {weight: array.shape for weight, array in weights.items()}
    by_file: dict[str, list[Piece]] = {}
    for piece in lay_out(family.tensors, shapes, vocab_size, family.architecture, family.copied):
        by_file.setdefault(piece.file, []).append(piece)
    file_shapes = {name: pieces[0].rearrangement.file_shape for name, pieces in by_file.items()}
    dtypes = {
        # A correction bias moves in steps that a narrow dtype would lose.
        name: weights[pieces[0].weight].dtype if dtype is None or "correction_bias" in pieces[0].weight else dtype
        for name, pieces in by_file.items()
    }
    _check_range(weights, {pieces[0].weight: dtypes[name] for name, pieces in by_file.items()})
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in file_shapes.items()}
    largest = max(sizes, key=sizes.__getitem__)
    names = {"architectures": [family.architecture], "model_type": family.model_type, "pad_token_id": None}
    _write_json(path / "config.json", {**names, **hf, "torch_dtype": dtypes[largest].name})

    split = split_state_dict_into_shards_factory(
        dict(sorted(sizes.items())), get_storage_size=int, filename_pattern=FILES, max_shard_size=shard_bytes
    )
    if split.is_sharded:
        _write_json(path / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    for file, shard in split.filename_to_tensors.items():
        with open(path / file, "wb") as opened:
            write_header(opened, {name: (dtypes[name], file_shapes[name]) for name in shard})
            for name in progress(shard, f"writing {file}"):
                pieces = by_file[name]
                tensor = np.empty(file_shapes[name], weights[pieces[0].weight].dtype)
                for piece in pieces:
                    piece.write(weights[piece.weight], tensor)
                opened.write(tensor.astype(dtypes[name], copy=False).reshape(-1).view(np.uint8))


def _check_range(weights: Mapping[WeightPath, np.ndarray], dtypes: Mapping[WeightPath, np.dtype]) -> None:
    largest = float(np.finfo(np.float16).max)
    wide = [path for path in weights if dtypes.get(path) == np.float16 and weights[path].dtype != np.float16]
    over = [dotted(path) for path in wide if weights[path].max() > largest or weights[path].min() < -largest]
    if over:
        raise UserError(
            f"dtype=float16 holds values up to {largest:,.0f}, and these weights have larger ones: {first_few(over)}. "
            "Give dtype=bfloat16 or float32."
        )


def _write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
