"""Loads a model's weights from a checkpoint, a run that trained adapters, or a Hugging Face folder."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from src.checkpoint.format import Restored
from src.checkpoint.restore import newest_meta, restore_any, restore_weights
from src.config.model_folders import is_hf_folder
from src.config.run_configs import HUB
from src.config.schema import Checkpoint
from src.data.fingerprint import TOKENIZER_KEYS
from src.data.processes import check_same
from src.data.types import Tokenizer
from src.model import lora
from src.model.params import Tree, by_path, dotted, join, nested
from src.system.errors import UserError, changed_keys


def load_state(path: str, wanted: Mapping[str, Any], vocab_size: int) -> Restored:
    """Loads the whole state of a run or checkpoint, for `load_full_state_path`.

    `wanted` is `restore_latest`'s `abstract_state`. Raises as `restore_any` does, and UserError if the vocabulary size
    differs.
    """
    # Never adapters: src/config/optional_checks.py refuses lora_rank, which needs load_parameters_path, with this key.
    restored = restore_any(path, lambda meta, saved: wanted, ", ".join(wanted))
    check_vocabulary(vocab_size, restored.meta)
    return restored


def load_base(keys: Checkpoint, adapters: Mapping[str, Any], tree: Tree) -> Tree:
    """Loads the base weights of a resumed run with adapters, which its checkpoints leave out.

    Raises as `load_weights` does, and UserError if `adapters`, from a checkpoint's meta, were trained on other weights.
    """
    check_base(adapters, keys.load_parameters_path, keys.load_ema)
    return load_weights(keys.load_parameters_path, tree, keys.load_ema).state


def load_weights(path: str, tree: Tree, ema: bool = False, keep_dtypes: bool = False) -> Restored:
    """Loads the weights of a run, a checkpoint, or a Hugging Face folder or hf:// name, and merges adapters into them.

    `tree` has all of a model's weights as `jax.ShapeDtypeStruct`s with shardings; `ema` loads the moving averages of
    trained weights; `keep_dtypes` keeps a checkpoint's saved dtypes instead of those in `tree`. Returns the weights; a
    checkpoint's meta, or a Hugging Face folder's `vocab_size` and `tokenizer`; messages for the user. Raises UserError
    if weights are missing, damaged, or from another model, or if the run has no moving averages; TransientError if they
    could not be read after several attempts.
    """
    if folder := hf_folder(path):
        if ema:
            raise UserError(f"load_ema: {path} is a Hugging Face folder, which has no average of its weights")
        check_same({"their identity": identity(path)}, f"weights in {path}", "the same files")
        from src.extras.hf.load import restore_folder

        return restore_folder(path, folder, tree)

    arrays, meta, messages = restore_weights(path, functools.partial(_wanted, tree, keep_dtypes), ema)
    restored = nested({undotted(name): array for name, array in arrays.items()})
    if "lora" not in meta:
        return Restored(restored, meta, messages)
    adapters = restored.pop("lora")
    base_ema = meta["lora"].get("base_ema", False)
    check_base(meta["lora"], meta["lora"]["base"], base_ema)
    base, _, base_messages = load_weights(meta["lora"]["base"], tree, base_ema, keep_dtypes)
    whole = join(base, restored)  # weights trained together with the adapters replace base weights
    merged = lora.merge(whole, adapters, meta["lora"]["alpha"])
    note = f"merged the adapters of {path} into the weights of {meta['lora']['base']}."
    return Restored(merged, meta, [*base_messages, *messages, note])


def _wanted(tree: Tree, keep_dtypes: bool, meta: Mapping[str, Any], saved: Mapping[str, Any]) -> Tree:
    """Abstract arrays to restore, by dotted name: all of `tree`, or for a run with adapters, those that it saved.

    The latter include the adapters, replicated. `saved` has the shape and dtype of each saved array. With
    `keep_dtypes`, weights have their saved dtypes instead of those in `tree`.
    """
    leaves = {dotted(path): leaf for path, leaf in by_path(tree).items()}
    if "lora" in meta:
        leaves = {name: leaf for name, leaf in leaves.items() if name in saved}
    replicated = jax.tree.leaves(tree)[0].sharding
    if isinstance(replicated, NamedSharding):
        replicated = replicated.update(spec=PartitionSpec())
    for name, entry in saved.items():
        if name.startswith("lora."):
            leaves[name] = jax.ShapeDtypeStruct(entry["shape"], entry["dtype"], sharding=replicated)
        elif keep_dtypes and name in leaves:
            leaves[name] = leaves[name].update(dtype=entry["dtype"])
    return leaves


def undotted(name: str) -> tuple[str | int, ...]:
    """Parses a weight's dotted name, the inverse of `params.dotted`."""
    return tuple(int(word) if word.isdecimal() else word for word in name.split("."))


def identity(path: str) -> str:
    """Makes a string that changes with the weights at `path`, from a checkpoint's digests or the ends of files.

    Raises as `hf_folder` and `newest_meta` do.
    """
    if not (folder := hf_folder(path)):
        return newest_meta(path)[1]
    from src.extras.hf.load import folder_identity

    return folder_identity(folder, identity)


def hf_folder(path: str) -> str:
    """Returns the folder of the Hugging Face model `path`, fetched first if it is on the hub; "" for other paths.

    Raises UserError if a hub name has no config.json or cannot be fetched, or if only some processes find the folder;
    TransientError if the hub does not answer.
    """
    folder = path
    if path.startswith(HUB):
        from src.extras.hf.hub import local_folder

        folder = local_folder(path)
    kind = is_hf_folder(folder)
    if path.startswith(HUB) and not kind:
        raise UserError(f"{path} has no config.json: expected a model in the format of transformers")
    check_same({"a Hugging Face folder": str(kind)}, f"contents in {path}", "the same folder")
    return folder if kind else ""


def check_base(adapters: Mapping[str, Any], path: str, ema: bool) -> None:
    """Raises UserError if adapters, as their checkpoint's meta describes them, were trained on other weights.

    That includes the same run's weights with another value of load_ema, `ema`.
    """
    if ema != adapters.get("base_ema", False):
        raise UserError(f"these adapters were trained with load_ema={str(not ema).lower()}: set it to that again")
    if identity(path) != adapters["base_identity"]:
        raise UserError(
            f"the weights at {path} are not the ones on which these adapters were trained, at {adapters['base']}, or "
            "have changed since (a run's folder means its newest checkpoint): adapters are useless without them. "
            "Restore them there."
        )


def check_vocabulary(vocab_size: int, meta: Mapping[str, Any]) -> None:
    """Raises UserError if a checkpoint has a different vocabulary size, which padding would hide."""
    if meta["vocab_size"] != vocab_size:
        raise UserError(
            f"the checkpoint's vocab_size is {meta['vocab_size']}, and this configuration's is {vocab_size}: "
            "set vocab_size to the checkpoint's"
        )


def check_tokenizer(accept_changes: Sequence[str], meta: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
    """Raises UserError if weights were trained with another known tokenizer, unless `accept_changes` allows it."""
    old, new = meta.get("tokenizer"), tokenizer.fingerprint() if tokenizer else None
    if not old or not new or set(accept_changes).intersection(TOKENIZER_KEYS):
        return
    if names := changed_keys(old, new):
        listed = "\n".join(f"  {name}: {old.get(name)} -> {new.get(name)}" for name in names)
        raise UserError(
            f"The checkpoint was trained with another tokenizer (old -> new):\n{listed}\n"
            "Set tokenizer_type and tokenizer_path to its own, or, if its ids mean the same in this one, accept it: "
            "accept_changes=[tokenizer_path]"
        )
