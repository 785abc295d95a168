"""Loads the weights that a new run begins with."""

from collections.abc import Sequence

from src.checkpoint.load_weights import check_tokenizer, check_vocabulary, load_weights
from src.data.types import InputSpec
from src.model.params import Tree, join


def initial_weights(inputs: InputSpec, accept_changes: Sequence[str], tree: Tree, axes: Tree) -> tuple[Tree, list[str]]:
    """Loads the weights that a run begins with, by `load_parameters_path` and `load_weights_rules`; also messages.

    The rules' weights replace those loaded from the path; without a path, only they are returned. `tree` is as in
    `load_weights`; `axes` has the logical axes of its weights. Raises as `load_weights` and `load_by_rules` do, and
    UserError if the weights were trained with another vocabulary or tokenizer.
    """
    keys = inputs.config.checkpoint
    weights, metas, messages = {}, [], []
    if keys.load_weights_rules:
        from src.extras.weights_by_rules import load_by_rules

        weights, metas, messages = load_by_rules(keys.load_weights_rules, tree, axes, keys.load_ema)
    if path := keys.load_parameters_path:
        others, meta, notes = load_weights(path, tree, keys.load_ema)
        weights, metas, messages = join(others, weights), [meta, *metas], [*notes, *messages]
    for meta in metas:
        check_vocabulary(inputs.vocab_size, meta)
        check_tokenizer(accept_changes, meta, inputs.tokenizer)
    return weights, messages
