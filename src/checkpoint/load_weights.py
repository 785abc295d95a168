"""Loads a model's weights from a checkpoint, a run that trained adapters, or a Hugging Face folder."""

import functools
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from src.checkpoint.restore import checkpoint_identity, restore_weights
from src.data.host_arrays import check_same
from src.data.tokenizer import folder_tokenizer, has_tokenizer
from src.errors import UserError
from src.model import lora
from src.model.params import Tree, by_path, dotted, join, nested

TAIL_BYTES = 2**16  # read of each file: training changes the last bytes as it does all others


def load_weights(path: str, tree: Tree, keep_dtypes: bool = False) -> tuple[Tree, dict[str, Any], list[str]]:
    """Loads the weights of a run's folder, a checkpoint or a Hugging Face folder, merging adapters into theirs.

    `tree` has all of a model's weights as `jax.ShapeDtypeStruct`s with shardings; `keep_dtypes` takes the saved dtypes
    in place of `tree`'s. Returns the weights; a checkpoint's meta, or a Hugging Face folder's `vocab_size` and
    `tokenizer`; messages for the user. Raises UserError if there are none, or damaged ones, or another model's.
    """
    if _is_hf_folder(path):
        check_same({"their identity": identity(path)}, f"weights in {path}", "the same files")
        return _load_hf_weights(path, tree)

    restored, meta, messages = restore_weights(path, functools.partial(_wanted, tree, keep_dtypes))
    if "lora" not in meta:
        return restored, meta, messages
    adapters = restored.pop("lora")
    check_base(meta["lora"], meta["lora"]["base"])
    base, _, base_messages = load_weights(meta["lora"]["base"], tree, keep_dtypes)
    whole = join(base, restored)  # weights trained beside the adapters replace the base's
    merged = lora.merge(whole, adapters, meta["lora"]["alpha"])
    return merged, meta, [*base_messages, *messages, "its adapters are merged."]


def _wanted(tree: Tree, keep_dtypes: bool, meta: Mapping[str, Any], saved: Mapping[str, Any]) -> Tree:
    """Returns what to restore: all weights; of a run with adapters, these and the weights trained beside them."""
    leaves = {path: leaf for path, leaf in by_path(tree).items() if "lora" not in meta or dotted(path) in saved}
    replicated = jax.tree.leaves(tree)[0].sharding
    if isinstance(replicated, NamedSharding):
        replicated = replicated.update(spec=PartitionSpec())
    for name in (name for name in saved if name.startswith("lora.")):
        path = tuple(int(word) if word.isdecimal() else word for word in name.split("."))
        leaves[path] = jax.ShapeDtypeStruct(saved[name]["shape"], saved[name]["dtype"], sharding=replicated)
    if keep_dtypes:
        for path, leaf in leaves.items():
            if dotted(path) in saved:
                leaves[path] = leaf.update(dtype=saved[dotted(path)]["dtype"])
    return nested(leaves)


def _load_hf_weights(path: str, tree: Tree) -> tuple[Tree, dict[str, Any], list[str]]:
    from src.hf.load import load_weights as load_folder
    from src.hf.model_keys import read_model_keys

    notes: list[str] = []
    arrays = load_folder(path, tree, notes)
    vocab_size = read_model_keys(path)["vocab_size"]
    meta = {"vocab_size": vocab_size, "tokenizer": folder_fingerprint(Path(path).expanduser(), vocab_size, notes)}
    return arrays, meta, [*notes, f"read the weights of {path}."]


def folder_fingerprint(folder: Path, vocab_size: int, notes: list[str]) -> dict[str, Any] | None:
    """Returns the fingerprint of a Hugging Face folder's tokenizer; None, with a note if it is unreadable."""
    if not has_tokenizer(folder):
        return None
    try:
        return folder_tokenizer(folder, vocab_size).fingerprint()
    except UserError as error:
        notes.append(f"nothing is known of the tokenizer of these weights: {error}")
        return None


def identity(path: str) -> str:
    """Returns a text that changes with the weights at `path`: of a checkpoint's digests, or of the ends of files."""
    if not _is_hf_folder(path):
        return checkpoint_identity(path)
    crc = 0
    for file in sorted(Path(path).expanduser().glob("*.safetensors")):
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            crc = zlib.crc32(f"{file.name} {size}".encode() + stream.read(), crc)
    return f"{crc:08x}"


def _is_hf_folder(path: str) -> bool:
    from src.hf.folder import is_hf_folder

    kind = is_hf_folder(path)
    check_same({"a Hugging Face folder": str(kind)}, f"contents in {path}", "the same folder")
    return kind


def check_base(adapters: Mapping[str, Any], path: str) -> None:
    """Raises UserError if adapters, as their checkpoint's meta describes them, were trained on other weights."""
    if identity(path) != adapters["base_identity"]:
        raise UserError(
            f"the weights at {path} are not those on which these adapters were trained, at {adapters['base']}, or have "
            "changed since (a run's folder means its newest checkpoint): adapters mean nothing without them. Restore "
            "them there."
        )
