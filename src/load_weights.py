"""A model's weights from wherever they are: a checkpoint, a run that trained adapters, a Hugging Face folder."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from src.checkpoint import checkpoint_identity, restore_weights
from src.errors import UserError
from src.hf.facts import folder_facts
from src.hf.folder import is_hf_folder, open_folder
from src.hf.load import load_weights as load_hf_weights
from src.model import lora
from src.model.weights import Tree, by_path, dotted, join, nested


def load_weights(path: str, tree: Tree, keep_dtypes: bool = False) -> tuple[Tree, dict[str, Any], list[str]]:
    """The weights that `load_parameters_path` names. Adapters are merged into the weights they were trained on.

    Args:
        path: a run's folder, a checkpoint, or a Hugging Face folder.
        tree: all of a model's weights, nested dicts of `jax.ShapeDtypeStruct`s with shardings.
        keep_dtypes: give the weights the dtypes they were saved in, not `tree`'s.

    Returns:
        `tree` with arrays for its leaves; the checkpoint's meta, of which a Hugging Face folder gives `vocab_size`
        alone; and what to tell the user.

    Raises:
        UserError: there are no such weights, they are damaged, or they are another model's.
    """
    if is_hf_folder(path):
        notes: list[str] = []
        arrays = load_hf_weights(path, {"trainable": tree}, notes)["trainable"]
        meta = {"vocab_size": folder_facts(open_folder(path))["vocab_size"]}
        return arrays, meta, [*notes, f"read the weights of {path}."]

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


def identity(path: str) -> str:
    """A text that changes with the weights at `path`: with a checkpoint's digests, or the sizes of files."""
    if not is_hf_folder(path):
        return checkpoint_identity(path)
    sizes = sorted((file.name, file.stat().st_size) for file in Path(path).expanduser().glob("*.safetensors"))
    return f"{zlib.crc32(repr(sizes).encode()):08x}"


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
