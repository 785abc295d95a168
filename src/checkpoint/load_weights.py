"""Loads a model's weights from a checkpoint, a run that trained adapters, or a Hugging Face folder."""

import functools
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from src.checkpoint.format import Restored
from src.checkpoint.restore import checkpoint_identity, restore_any, restore_weights
from src.config.run_configs import HUB, has_tokenizer, is_hf_folder
from src.data.fingerprint import TOKENIZER_KEYS
from src.data.host_arrays import check_same
from src.data.types import Tokenizer
from src.model import lora
from src.model.params import Tree, by_path, dotted, join, nested
from src.system.errors import UserError, changed_keys, counted, first_few

TAIL_BYTES = 2**16  # read at the end of each file, which training changes too


def load_weights(path: str, tree: Tree, ema: bool = False, keep_dtypes: bool = False) -> Restored:
    """Loads the weights of a run, a checkpoint, or a Hugging Face folder or hf:// name, and merges adapters into them.

    `tree` has all of a model's weights as `jax.ShapeDtypeStruct`s with shardings; `ema` loads the averages of trained
    weights; `keep_dtypes` keeps the saved dtypes instead of those in `tree`. Returns the weights; a checkpoint's meta,
    or a Hugging Face folder's `vocab_size` and `tokenizer`; messages for the user. Raises UserError if weights are
    missing, damaged, or from another model.
    """
    if _is_hf_folder(path):
        if ema:
            raise UserError(f"load_ema: {path} is a Hugging Face folder, which has no average of its weights")
        check_same({"their identity": identity(path)}, f"weights in {path}", "the same files")
        return _load_hf_weights(path, tree)

    arrays, meta, messages = restore_weights(path, functools.partial(_wanted, tree, keep_dtypes), ema)
    restored = nested({_undotted(name): array for name, array in arrays.items()})
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


def load_adapters(path: str) -> tuple[dict[tuple[str | int, ...], tuple[np.ndarray, np.ndarray]], dict[str, Any]]:
    """Loads the adapters of a run with `lora_rank`: `down` and `up` of each adapted weight, and the checkpoint's meta.

    Raises UserError if the run trained no adapters, or whole weights as well.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def entries(meta: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        trained = [name for name in saved if name.startswith("trainable.")]
        if "lora" not in meta or (others := [name for name in trained if not name.startswith("trainable.lora.")]):
            what = f"whole weights with adapters: {first_few(others)}" if "lora" in meta else "no adapters (lora_rank)"
            raise UserError(f"{path} has {what}. `convert to-hf` exports the whole model")
        return {
            name: jax.ShapeDtypeStruct(saved[name]["shape"], saved[name]["dtype"], sharding=device) for name in trained
        }

    arrays, meta, _ = restore_any(path, entries, "the adapters")
    pairs: dict[Any, dict[Any, np.ndarray]] = {}
    for name, array in arrays.items():
        *weight, kind = _undotted(name)[2:]  # after trainable.lora
        pairs.setdefault(tuple(weight), {})[kind] = np.asarray(array)
    return {weight: (pair["down"], pair["up"]) for weight, pair in pairs.items()}, meta


def load_by_rules(
    rules: Sequence[Mapping[str, str]], tree: Tree, axes: Tree, ema: bool = False
) -> tuple[Tree, list[dict[str, Any]], list[str]]:
    """Loads the weights of `tree` that match `load_weights_rules`, each by the first matching rule, each path once.

    `tree` and `ema` are as in `load_weights`. Returns the weights; the meta of each path that provided a weight with a
    vocabulary axis, by its logical `axes`; messages. Raises UserError for a rule that matches no remaining weight, for
    a missing name, and as `load_weights` does.
    """
    leaves, axes_of, metas, messages = by_path(tree), by_path(axes), [], []
    sources: dict[str, dict[Any, str]] = {}  # by path: the weights to load and their names there
    taken: set[Any] = set()
    loaded: dict[Any, jax.Array] = {}
    for rule in rules:
        fitting = {path: re.fullmatch(rule["match"], dotted(path)) for path in leaves if path not in taken}
        try:
            names = {path: fit.expand(rule.get("name") or r"\g<0>") for path, fit in fitting.items() if fit}
        except (re.error, IndexError) as error:
            raise UserError(f"load_weights_rules: name={rule['name']} does not fit {rule['match']}: {error}") from None
        if not names:
            left = first_few(sorted(map(dotted, leaves.keys() - taken)), near=rule["match"])
            raise UserError(f"load_weights_rules: {rule['match']} fits none of the remaining weights: {left}")
        if len(set(names.values())) < len(names):
            twice = first_few(names.values())
            raise UserError(f"load_weights_rules: {rule['match']} gives two weights the same name: {twice}")
        taken |= names.keys()
        sources[rule["path"]] = sources.get(rule["path"], {}) | names
    for source, names in sources.items():
        arrays, meta, notes = _load_named(source, {name: leaves[path] for path, name in names.items()}, tree, ema)
        for path, name in names.items():
            array = arrays[name]
            if array.shape != (shape := leaves[path].shape):
                there, here = f"{name} of {source} has the shape {list(array.shape)}", f"{dotted(path)} {list(shape)}"
                raise UserError(f"load_weights_rules: {there}, and {here}")
            # Arrays are donated, so two weights loaded from the same name must not share an array.
            loaded[path] = array if list(names.values()).count(name) == 1 else jnp.array(array, leaves[path].dtype)
        metas += [meta] if any("vocab" in axes_of[path] for path in names) else []
        pairs = [dotted(path) + f" (there {name})" * (dotted(path) != name) for path, name in names.items()]
        messages += [*notes, f"load_weights_rules: from {source}: {', '.join(pairs)}"]
    if rules:
        messages.append(f"load_weights_rules: {counted(len(leaves) - len(taken), 'weight')} not affected by rules")
    return nested(loaded), metas, messages


def _load_named(path: str, wanted: Tree, tree: Tree, ema: bool) -> Restored:
    """Loads the weights with these dotted names; a Hugging Face folder must have all of `tree`."""
    if _is_hf_folder(path):
        arrays, meta, messages = load_weights(path, tree, ema)
        arrays = {dotted(where): array for where, array in by_path(arrays).items()}
        _check_names(path, wanted, arrays)
        return Restored(arrays, meta, messages)

    def named(meta: Mapping[str, Any], saved: Mapping[str, Any]) -> Tree:
        _check_names(path, wanted, saved)
        return wanted

    return restore_weights(path, named, ema, some=f"{len(wanted)} weights")


def _check_names(path: str, wanted: Iterable[str], available: Iterable[str]) -> None:
    for name in wanted:
        if name not in available:
            raise UserError(f"load_weights_rules: {path} has no {name}: it has {first_few(available, near=name)}")


def _wanted(tree: Tree, keep_dtypes: bool, meta: Mapping[str, Any], saved: Mapping[str, Any]) -> Tree:
    """Chooses the weights to restore: all, or for a run with adapters, the adapters and other trained weights."""
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


def _undotted(name: str) -> tuple[str | int, ...]:
    return tuple(int(word) if word.isdecimal() else word for word in name.split("."))


def _load_hf_weights(path: str, tree: Tree) -> Restored:
    from src.extras.hf.folder_tokenizer import folder_tokenizer
    from src.extras.hf.load import load_weights as load_folder
    from src.extras.hf.model_keys import read_model_keys

    notes: list[str] = []
    folder = _local(path)
    arrays = load_folder(folder, tree, notes)
    vocab_size = read_model_keys(folder)["vocab_size"]
    meta: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer": None}
    if has_tokenizer(place := Path(folder).expanduser()):
        try:
            meta["tokenizer"] = folder_tokenizer(place, vocab_size).fingerprint()
        except UserError as error:
            notes.append(f"the tokenizer of these weights is unknown: {error}")
    return Restored(arrays, meta, [*notes, f"read the weights of {path}."])


def identity(path: str) -> str:
    """Makes a text that changes with the weights at `path`, from a checkpoint's digests or the ends of files."""
    if not _is_hf_folder(path):
        return checkpoint_identity(path)
    from src.extras.hf.peft import base_model

    folder, crc = Path(_local(path)).expanduser(), 0
    if base := base_model(folder):
        crc = int(identity(base), 16)
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            crc = zlib.crc32(f"{file.name} {size}".encode() + stream.read(), crc)
    return f"{crc:08x}"


def _is_hf_folder(path: str) -> bool:
    kind = is_hf_folder(_local(path))
    if path.startswith(HUB) and not kind:
        raise UserError(f"{path} has no config.json: expected a model in the format of transformers")
    check_same({"a Hugging Face folder": str(kind)}, f"contents in {path}", "the same folder")
    return kind


def _local(path: str) -> str:
    if not path.startswith(HUB):
        return path
    from src.extras.hf.hub import local_folder

    return local_folder(path)


def check_base(adapters: Mapping[str, Any], path: str, ema: bool) -> None:
    """Raises UserError if adapters, as their checkpoint's meta describes them, were trained on other weights."""
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
