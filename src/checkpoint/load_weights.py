"""A model's weights from wherever they are: a checkpoint, a run that trained adapters, a Hugging Face folder."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from src.checkpoint.restore import checkpoint_identity, restore_weights
from src.data.tokenizer import folder_tokenizer, has_tokenizer
from src.errors import UserError
from src.model import lora
from src.model.params import Tree, by_path, dotted, join, nested

TAIL_BYTES = 2**16  # of each file, which training changes as it does all others


def load_weights(path: str, tree: Tree, keep_dtypes: bool = False) -> tuple[Tree, dict[str, Any], list[str]]:
    """The weights that `load_parameters_path` names. Adapters are merged into the weights they were trained on.

    Args:
        path: a run's folder, a checkpoint, or a Hugging Face folder.
        tree: all of a model's weights, nested dicts of `jax.ShapeDtypeStruct`s with shardings.
        keep_dtypes: give the weights the dtypes they were saved in, not `tree`'s.

    Returns:
        `tree` with arrays for its leaves; the checkpoint's meta, of which a Hugging Face folder gives `vocab_size`
        and `tokenizer`; and what to tell the user.

    Raises:
        UserError: there are no such weights, they are damaged, or they are another model's.
    """
    from src.hf.folder import is_hf_folder

    if is_hf_folder(path):
        return _load_hf_weights(path, tree)

    def wanted(meta: Mapping[str, Any], saved: Mapping[str, Any]) -> Tree:
        """All weights; of a run with adapters, what it trained of them, and the adapters."""
        flat = by_path(tree)
        chosen = {path: flat[path] for path in flat if "lora" not in meta or dotted(path) in saved}
        copied = _copied(next(iter(flat.values())).sharding)
        for name in (name for name in saved if name.startswith("lora.")):
            path = tuple(int(word) if word.isdecimal() else word for word in name.split("."))
            chosen[path] = jax.ShapeDtypeStruct(saved[name]["shape"], saved[name]["dtype"], sharding=copied)
        if keep_dtypes:
            as_saved = {path: saved[dotted(path)]["dtype"] for path in chosen if dotted(path) in saved}
            chosen = {
                path: jax.ShapeDtypeStruct(leaf.shape, as_saved.get(path, leaf.dtype), sharding=leaf.sharding)
                for path, leaf in chosen.items()
            }
        return nested(chosen)

    restored, meta, messages = restore_weights(path, wanted)
    if "lora" not in meta:
        return restored, meta, messages
    adapters = restored.pop("lora")
    check_base(meta["lora"], meta["lora"]["base"])
    base, _, base_messages = load_weights(meta["lora"]["base"], tree, keep_dtypes)
    spec = lora.LoraSpec(meta["lora"]["rank"], meta["lora"]["alpha"], ())
    whole = join(base, restored)  # what was trained whole takes the place of what it began as
    return lora.merge(whole, adapters, spec), meta, [*base_messages, *messages, "its adapters are merged."]


def _load_hf_weights(path: str, tree: Tree) -> tuple[Tree, dict[str, Any], list[str]]:
    from src.hf import folder, load, model_keys

    notes: list[str] = []
    arrays = load.load_weights(path, {"trainable": tree}, notes)["trainable"]
    vocab_size = model_keys.folder_keys(folder.open_folder(path))["vocab_size"]
    meta = {"vocab_size": vocab_size, "tokenizer": folder_fingerprint(Path(path).expanduser(), vocab_size, notes)}
    return arrays, meta, [*notes, f"read the weights of {path}."]


def folder_fingerprint(folder: Path, vocab_size: int, notes: list[str]) -> dict[str, Any] | None:
    """Of a Hugging Face folder's tokenizer; None where it has none that can be read, on which `notes` takes a line."""
    if not has_tokenizer(folder):
        return None
    try:
        return folder_tokenizer(folder, vocab_size).fingerprint()
    except UserError as error:
        notes.append(f"nothing is known of the tokenizer of these weights: {error}")
        return None


def identity(path: str) -> str:
    """A text that changes with the weights at `path`: with a checkpoint's digests, or with what files end in."""
    from src.hf.folder import is_hf_folder

    if not is_hf_folder(path):
        return checkpoint_identity(path)
    crc = 0
    for file in sorted(Path(path).expanduser().glob("*.safetensors")):
        with open(file, "rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL_BYTES))
            crc = zlib.crc32(f"{file.name} {size}".encode() + opened.read(), crc)
    return f"{crc:08x}"


def check_base(adapters: Mapping[str, Any], path: str) -> None:
    """Raises UserError where the weights at `path` are not those that adapters were trained on.

    `adapters` is what their checkpoint's meta says of them.
    """
    if identity(path) != adapters["base_identity"]:
        raise UserError(
            f"the weights at {path} are not those on which these adapters were trained, at {adapters['base']}, or have "
            "changed since (a run's folder means its newest checkpoint): adapters mean nothing without them. Restore "
            "them there."
        )


def _copied(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The sharding with a whole copy on each device."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding
