"""Where a run starts: resumed from its own checkpoint, from another run's, or new."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import FrozenConfigDict

from src.checkpoint import Checkpointer, absolute, restore_step
from src.config import compare_runs, from_yaml
from src.data.tokenizer import Tokenizer
from src.errors import UserError
from src.load_weights import check_base, identity, load_weights
from src.model.weights import Tree, join
from src.optimizer import hyper_parameters
from src.run_folder import RunFolder
from src.train_step import StepPlan, TrainState, init_state, state_weights

# The keys that alter an entry of the data's fingerprint: accepting one of them accepts the entry. The first is the one
# to tell a user whose configuration is the same as before.
SOURCE_KEYS = (
    *("dataset_path", "dataset_type", "dataset_name", "train_split", "dataset_factory", "dataset_column"),
    *("array_record_format", "datasets", "use_sft"),
)
TOKENIZER_KEYS = ("tokenizer_path", "tokenizer_type", "dataset_type")
ACCEPTED_BY = {
    "global batch": ("per_device_batch_size", "gradient_accumulation_steps"),
    "max_target_length": ("max_target_length",),
    "packing": ("packing",),
    "long_documents": ("long_documents", "packing"),
    "batch_transform": ("batch_transform",),
    "data_shuffle_seed": ("data_shuffle_seed",),
    "source max_document_bytes": ("max_document_bytes", *SOURCE_KEYS),
    "source pieces": (*SOURCE_KEYS, "max_document_bytes"),
    "source part": ("eval_interval", "eval_fraction", "eval_dataset_path", *SOURCE_KEYS),  # the part not held out
    "source seed": ("data_shuffle_seed", *SOURCE_KEYS),
    "source vocab_size": ("vocab_size", *SOURCE_KEYS),
    "tokenizer type": TOKENIZER_KEYS,
    "tokenizer vocab_size": TOKENIZER_KEYS,
    "tokenizer digest": TOKENIZER_KEYS,
    "tokenizer bos": TOKENIZER_KEYS,
    "tokenizer eos": TOKENIZER_KEYS,
    "chat template": ("tokenizer_path", "use_sft"),
    "sft_train_on_completion_only": ("sft_train_on_completion_only", "use_sft"),
}

Messages = list[str]


class Start(NamedTuple):
    """Where a run goes on, or begins.

    state: the whole state.
    rows_taken: rows of training data that came before.
    eval_position: of each rolling evaluation set by name, as `EvalBatches.position` gave it.
    messages: what to tell the user.
    """

    state: TrainState
    rows_taken: int
    eval_position: Mapping[str, Any]
    messages: Messages


def parts(state: TrainState) -> dict[str, Any]:
    """The state's fields by name, as checkpoints hold them."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def starting_state(
    config: FrozenConfigDict,
    plan: StepPlan,
    abstract: TrainState,
    folder: RunFolder,
    checkpointer: Checkpointer,
    fingerprint: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> Start:
    """The state to go on from, where in the data it stands, and what to tell the user about it.

    Raises:
        UserError: the run has no good checkpoint, is resumed with another model or other data than it had, or begins
            with weights that another tokenizer's ids were trained into.
    """
    saved = folder.read_text("config.yml")
    has_checkpoints = (folder.path / "checkpoints").exists()
    if has_checkpoints and not config.enable_checkpointing:
        raise UserError(
            f"{folder.path} has checkpoints, which a run with enable_checkpointing=false would neither use nor keep "
            "up. Use another run_name."
        )
    if has_checkpoints:
        changes = ["the run's config.yml is missing or empty: nobody can tell what has changed since its last start"]
        if saved:
            changes = compare_configs(config, saved)
        restored = checkpointer.restore_latest(saved_parts(plan, abstract))
        if restored is not None:
            fields, meta, messages = restored
            if plan.lora:
                fields["frozen"] = base_weights(plan, abstract, meta, config.load_parameters_path)
            start = with_position(fields, meta, config, abstract, fingerprint)
            resumed = f"resumed from step {int(start.state.step)}"
            return start._replace(messages=[*changes, *messages, resumed, *start.messages])
    if path := config.load_full_state_path:
        wanted = parts(abstract)  # config_checks.py: no adapters here, whose base load_parameters_path would be
        fields, meta, messages = restore_step(path, wanted, tuple(wanted))
        check_vocabulary(config, meta)
        start = with_position(fields, meta, config, abstract, fingerprint)
        return start._replace(messages=[*messages, *start.messages])
    if config.load_parameters_path:
        weights, meta, messages = load_weights(config.load_parameters_path, all_weights(abstract))
        check_vocabulary(config, meta)
        check_tokenizer(config, meta, tokenizer)
        return Start(state_of(weights, config, plan, abstract), 0, {}, messages)
    return Start(new_state(config, plan, abstract), 0, {}, [])


def saved_parts(plan: StepPlan, state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of a state: all of it, but adapters without the weights that they are trained on."""
    saved = parts(state)
    if plan.lora:
        del saved["frozen"]
    return saved


def saved_meta(config: FrozenConfigDict, fingerprint: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a checkpoint says of itself beside its arrays."""
    meta = {
        "data": fingerprint,
        "vocab_size": config.vocab_size,
        "tokenizer": tokenizer.fingerprint() if tokenizer else None,
    }
    if config.lora_rank:
        base = str(absolute(config.load_parameters_path))
        meta["lora"] = {"rank": config.lora_rank, "alpha": config.lora_alpha, "base": base}
        meta["lora"]["base_identity"] = identity(config.load_parameters_path)
    return meta


def base_weights(plan: StepPlan, abstract: TrainState, meta: Mapping[str, Any], path: str) -> Tree:
    """The frozen part of a state whose checkpoint holds adapters without it: the weights at `path`.

    Raises:
        UserError: the adapters were trained on others.
    """
    check_base(meta["lora"], path)
    weights, _, _ = load_weights(path, all_weights(abstract))
    return plan.by_part(weights)["frozen"]


def all_weights(abstract: TrainState) -> Tree:
    """The model's weights, whatever part of the state they are in, without adapters."""
    weights = join(*state_weights(abstract))
    return {name: entry for name, entry in weights.items() if name != "lora"}


def state_of(weights: Tree, config: FrozenConfigDict, plan: StepPlan, abstract: TrainState) -> TrainState:
    """The state before the first step of a run that starts from these weights."""
    loaded = plan.by_part(weights)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def rest(loaded: dict[str, Tree]) -> TrainState:
        """All that a new state has and `loaded` lacks: adapters, the optimizer's arrays, the position."""
        adapters = {"lora": plan.init_adapters()} if plan.lora else {}
        trainable = join(loaded["trainable"], adapters)
        return init_state(
            plan, hyper_parameters(config, 0), abstract.data_position.shape, {**loaded, "trainable": trainable}
        )

    return jax.jit(rest, out_shardings=shardings, donate_argnums=0)(loaded)


def new_state(config: FrozenConfigDict, plan: StepPlan, abstract: TrainState) -> TrainState:
    """The state before the first step, made where it belongs, the same on every mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    init = functools.partial(init_state, plan, hyper_parameters(config, 0), abstract.data_position.shape)
    # It runs once: XLA's CPU backend takes six times as long to optimise the random numbers as to compile them plainly.
    return jax.jit(init, out_shardings=shardings, compiler_options={"xla_backend_optimization_level": 0})()


def compare_configs(config: FrozenConfigDict, saved: str) -> Messages:
    """What changed since the run's own config.yml.

    Raises:
        UserError: a change alters weights or data, and `accept_changes` does not name it.
    """
    harmless, breaking = compare_runs(from_yaml(saved), config)
    if breaking:
        keys = ", ".join(change.key for change in breaking)
        listed = "\n".join(f"  {change}" for change in breaking)
        raise UserError(
            f"This run was started with other settings of its weights or data (old -> new):\n{listed}\n"
            "Give them as they were, use another run_name, or, where they leave all shapes as they are, accept them: "
            f"accept_changes=[{keys}]"
        )
    return [f"changed since the run's last start: {change}" for change in harmless]


def check_vocabulary(config: FrozenConfigDict, meta: Mapping[str, Any]) -> None:
    """Raises UserError where a checkpoint's vocabulary is another one, which padding would hide."""
    if meta["vocab_size"] != config.vocab_size:
        raise UserError(
            f"the checkpoint's vocab_size is {meta['vocab_size']}, and this configuration's is {config.vocab_size}: "
            "set vocab_size to the checkpoint's"
        )


def check_tokenizer(config: FrozenConfigDict, meta: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
    """Raises UserError where a checkpoint's weights know another tokenizer's ids, unless `accept_changes` says so.

    Nothing is known of a checkpoint from before tokenizers were recorded, nor of one trained on synthetic data.
    """
    old, new = meta.get("tokenizer"), tokenizer.fingerprint() if tokenizer else None
    if not old or not new or set(config.accept_changes).intersection(TOKENIZER_KEYS):
        return
    different = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if different:
        listed = "\n".join(f"  {name}: {old.get(name)} -> {new.get(name)}" for name in different)
        raise UserError(
            f"The checkpoint was trained with another tokenizer (old -> new):\n{listed}\n"
            "Set tokenizer_type and tokenizer_path to its own, or, where its ids mean the same in this one, accept it: "
            "accept_changes=[tokenizer_path]"
        )


def with_position(
    fields: Mapping[str, Any],
    meta: Mapping[str, Any],
    config: FrozenConfigDict,
    abstract: TrainState,
    fingerprint: Mapping[str, Any],
) -> Start:
    """The restored state, if it stands in the data that the config describes.

    Where the user accepts another global batch size or row length, the data go on after as many documents, or rows of
    tokens, as were taken: what some lanes were ahead of the others is repeated, what they were behind is missed. Where
    the number of sources is another, they start over.

    Raises:
        UserError: the data differ, and `accept_changes` does not say that they may.
    """
    old = meta["data"]
    # Files were not listed one by one before; where both lists are there they say which file it is.
    lists_files = {is_listed(old), is_listed(fingerprint)} == {True}
    different = [
        name
        for name in {**old, **fingerprint}
        if old.get(name) != fingerprint.get(name) and (lists_files or " file " not in name)
    ]
    refused = [name for name in different if not set(config.accept_changes).intersection(accepted_by(name))]
    if refused:
        listed = "\n".join(f"  {name}: {old.get(name)} -> {fingerprint.get(name)}" for name in refused)
        keys = ", ".join(dict.fromkeys(accepted_by(name)[0] for name in refused))
        raise UserError(
            f"The checkpoint stands in other data than the config describes (old -> new):\n{listed}\n"
            f"Restore the data, or accept that examples repeat or are missed: accept_changes=[{keys}]"
        )
    rows_taken = meta.get("rows_taken", int(fields["step"]) * old["global batch"])
    if config.packing:  # else a row is a document, whatever its length
        rows_taken = rows_taken * old["max_target_length"] // fingerprint["max_target_length"]
    eval_position = meta.get("eval_position", {})
    position, wanted = fields["data_position"], abstract.data_position
    if position.shape == wanted.shape:
        return Start(TrainState(**fields), rows_taken, eval_position, [])
    if position.shape[1] == wanted.shape[1]:
        moved, told = after_documents(np.asarray(position), wanted.shape[0]), "the data go on after {:,} documents"
        message = f"the global batch changed: {told.format(int(moved[..., 0].sum()))}"
    else:
        moved, rows_taken = np.zeros(wanted.shape, np.int32), 0
        message = "the number of datasets changed: the data start over"
    state = TrainState(**{**fields, "data_position": jax.device_put(moved, wanted.sharding)})
    return Start(state, rows_taken, eval_position, [message])


def after_documents(position_BS2: np.ndarray, rows: int) -> np.ndarray:
    """The position [rows, S, 2] of lanes that go on after as many documents as those of `position_BS2` have taken."""
    taken_S = position_BS2[..., 0].sum(axis=0)
    # Lane j has the documents j, j + rows, ...: of the first n it has ceil((n - j) / rows).
    taken_BS = -((np.arange(rows)[:, None] - taken_S) // rows)
    return np.stack([np.maximum(taken_BS, 0), np.zeros_like(taken_BS)], axis=-1).astype(np.int32)


def is_listed(fingerprint: Mapping[str, Any]) -> bool:
    """Whether a fingerprint has its files one by one."""
    return any(" file " in name for name in fingerprint)


def accepted_by(name: str) -> tuple[str, ...]:
    """The keys of which `accept_changes` has to name one, where an entry of the data's fingerprint has changed."""
    if name in ACCEPTED_BY:
        return ACCEPTED_BY[name]
    in_mixture = name == "source weights" or (name.startswith("source ") and len(name.split()) > 2)
    return ("datasets", *SOURCE_KEYS) if in_mixture and " file " not in name else SOURCE_KEYS
