"""Where a run starts: resumed from its own checkpoint, from another run's, or new."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
SOURCE_KEYS = ("dataset_path", "dataset_type", "use_sft")
TOKENIZER_KEYS = ("tokenizer_path", "tokenizer_type", "dataset_type")
ACCEPTED_BY = {
    "global batch": ("per_device_batch_size", "gradient_accumulation_steps"),
    "max_target_length": ("max_target_length",),
    "packing": ("packing",),
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
) -> tuple[TrainState, Messages]:
    """The state to go on from, and what to tell the user about it.

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
            state, more = with_position(fields, meta, config, abstract, fingerprint)
            return state, [*changes, *messages, f"resumed from step {int(state.step)}", *more]
    if path := config.load_full_state_path:
        wanted = parts(abstract)  # config_checks.py: no adapters here, whose base load_parameters_path would be
        fields, meta, messages = restore_step(path, wanted, tuple(wanted))
        check_vocabulary(config, meta)
        state, more = with_position(fields, meta, config, abstract, fingerprint)
        return state, [*messages, *more]
    if config.load_parameters_path:
        weights, meta, messages = load_weights(config.load_parameters_path, all_weights(abstract))
        check_vocabulary(config, meta)
        check_tokenizer(config, meta, tokenizer)
        return state_of(weights, config, plan, abstract), messages
    return new_state(config, plan, abstract), []


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
) -> tuple[TrainState, Messages]:
    """The restored state, if it stands in the data that the config describes.

    Where the user accepts another global batch size, rows no longer mean the same lanes, so all of them start over.

    Raises:
        UserError: the data differ, and `accept_changes` does not say that they may.
    """
    old = meta["data"]
    different = [name for name in {**old, **fingerprint} if old.get(name) != fingerprint.get(name)]
    refused = [
        name for name in different if not set(config.accept_changes).intersection(ACCEPTED_BY.get(name, SOURCE_KEYS))
    ]
    if refused:
        listed = "\n".join(f"  {name}: {old.get(name)} -> {fingerprint.get(name)}" for name in refused)
        keys = ", ".join(dict.fromkeys(ACCEPTED_BY.get(name, SOURCE_KEYS)[0] for name in refused))
        raise UserError(
            f"The checkpoint stands in other data than the config describes (old -> new):\n{listed}\n"
            f"Restore the data, or accept that examples repeat or are missed: accept_changes=[{keys}]"
        )
    if fields["data_position"] is not None:
        return TrainState(**fields), []
    position = jax.device_put(jnp.zeros(abstract.data_position.shape, jnp.int32), abstract.data_position.sharding)
    return TrainState(**{**fields, "data_position": position}), ["the data start over: the global batch changed"]
