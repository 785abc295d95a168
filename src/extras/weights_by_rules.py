"""Loads the weights that rules choose, from several places (`load_weights_rules`)."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from src.checkpoint.format import Restored
from src.checkpoint.load_weights import hf_folder, load_weights
from src.checkpoint.restore import restore_weights
from src.model.params import Tree, by_path, dotted, nested
from src.system.errors import UserError, counted, first_few


def load_by_rules(
    rules: Sequence[Mapping[str, str]], tree: Tree, axes: Tree, ema: bool = False
) -> tuple[Tree, list[dict[str, Any]], list[str]]:
    """Loads the weights of `tree` that match `load_weights_rules`, each by the first rule that matches it.

    Each rule's path is read once. `tree` and `ema` are as in `load_weights`; `axes` are the logical axes of the weights
    in `tree`. Returns only the matching weights; the meta of each path that provided a weight with a vocabulary axis;
    messages. Raises UserError for a rule that matches no remaining weight or gives two weights one name, for a name
    that its path lacks or has with another shape, and as `load_weights` does.
    """
    leaves, axes_of, metas, messages = by_path(tree), by_path(axes), [], []
    sources: dict[str, dict[Any, str]] = {}  # path -> the weights to load from it, with their names there
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
            twice = first_few(name for name, count in Counter(names.values()).items() if count > 1)
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
    """Loads the weights `wanted`, keyed by their dotted names in `path`, with adapters merged into them.

    From a Hugging Face folder, it loads and returns all of `tree`, which the folder must have; so too from a run with
    adapters, if a wanted weight has an adapter or was not saved. Raises UserError for a wanted name that `path` lacks.
    """

    def named(meta: Mapping[str, Any], saved: Mapping[str, Any]) -> Tree:
        adapted = {name.removeprefix("lora.").rpartition(".")[0] for name in saved if name.startswith("lora.")}
        if "lora" in meta and not wanted.keys() <= saved.keys() - adapted:
            raise _IncompleteError
        _check_names(path, wanted, saved)
        return wanted

    if not hf_folder(path):
        with contextlib.suppress(_IncompleteError):
            return restore_weights(path, named, ema, some=f"{len(wanted)} weights")
    arrays, meta, messages = load_weights(path, tree, ema)
    arrays = {dotted(where): array for where, array in by_path(arrays).items()}
    _check_names(path, wanted, arrays)
    return Restored(arrays, meta, messages)


class _IncompleteError(Exception):
    """Raised for a run with adapters, if a wanted weight has an adapter or is saved only with the run's base."""


def _check_names(path: str, wanted: Iterable[str], available: Iterable[str]) -> None:
    for name in wanted:
        if name not in available:
            raise UserError(f"load_weights_rules: {path} has no {name}: it has {first_few(available, near=name)}")
