"""Where a run starts: resumed from its own checkpoint, from another run's, or new."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.load_weights import check_base, identity, load_weights
from src.checkpoint.restore import HostArray, restore_step
from src.checkpoint.run_folder import RunFolder, absolute
from src.config.load import compare_runs, from_yaml
from src.config.schema import KEYS, Config
from src.config.source_spec import SETTINGS, train_specs, train_weights
from src.data.fingerprint import Fact
from src.data.host_arrays import to_global
from src.data.mixture import Mixture
from src.data.packing import documents_consumed, remap_position
from src.data.types import Tokenizer
from src.errors import UserError, first_few
from src.model.params import Tree, Weights, join
from src.model.spec import model_spec
from src.step.optimizer import hparams_at
from src.step.plan import StepPlan, make_plan
from src.step.state import TrainState, abstract_state, init_state

# The keys that alter an entry of the data's fingerprint: accepting one of them accepts the entry. The first is the one
# to tell a user whose configuration is the same as before.
SOURCE_KEYS = ("dataset_path", *(keys[0] for keys in SETTINGS.values()), "datasets", "use_sft")
TOKENIZER_KEYS = ("tokenizer_path", "tokenizer_type", "dataset_type")
ACCEPTED_BY = {
    "global batch": ("per_device_batch_size", "gradient_accumulation_steps"),
    "max_target_length": ("max_target_length",),
    "packing": ("packing",),
    "packing of conversations": ("packing", *SOURCE_KEYS),
    "long_documents": ("long_documents", "packing"),
    "batch_transform": ("batch_transform",),
    "data_shuffle_seed": ("data_shuffle_seed",),
    "source max_document_bytes": ("max_document_bytes", *SOURCE_KEYS),
    "source pieces": (*SOURCE_KEYS, "max_document_bytes"),
    "source part": (
        "eval_interval",
        "eval_fraction",
        "eval_dataset_path",
        "eval_dataset_name",
        "eval_datasets",
        *SOURCE_KEYS,
    ),  # the part not held out
    "source weights": ("datasets", *SOURCE_KEYS),
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
    position: int32 [B, S, 2], of each row's documents in each source; None: all at their start.
    rows_taken, rows_before: as `rows_consumed` counts them.
    eval_position: of each rolling evaluation set by name, as `EvalBatches.position` gave it.
    messages: what to tell the user.
    resumed: whether this is the run's own checkpoint.
    """

    state: TrainState
    position: np.ndarray | None
    rows_taken: int
    rows_before: Mapping[str, int]
    eval_position: Mapping[str, Any]
    messages: Messages
    resumed: bool = False


def starting_state(
    config: Config,
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
            changes = compare_configs(config, saved, plan, abstract)
        restored = checkpointer.restore_latest(abstract_entries(plan, abstract))
        if restored is not None:
            fields, meta, messages = restored
            if plan.lora:
                fields["frozen"] = base_weights(plan, abstract, meta, config.load_parameters_path)
            start = with_position(fields, meta, config, fingerprint)
            resumed = f"resumed from step {int(start.state.step)}"
            return start._replace(messages=[*changes, *messages, resumed, *start.messages], resumed=True)
    if path := config.load_full_state_path:
        # src/config/checks.py lets no adapters come here, whose base load_parameters_path would be.
        wanted = abstract_entries(plan, abstract)
        fields, meta, messages = restore_step(path, wanted, tuple(wanted))
        check_vocabulary(config, meta)
        start = with_position(fields, meta, config, fingerprint)
        return start._replace(messages=[*messages, *start.messages])
    if config.load_parameters_path:
        weights, meta, messages = load_weights(config.load_parameters_path, all_weights(abstract))
        check_vocabulary(config, meta)
        check_tokenizer(config, meta, tokenizer)
        return Start(state_of(weights, config, plan, abstract), None, 0, {}, {}, messages)
    return Start(new_state(config, plan, abstract), None, 0, {}, {}, [])


def checkpoint_entries(
    plan: StepPlan, state: TrainState, position: np.ndarray, rows: Sequence[int], global_batch: int
) -> dict[str, Any]:
    """Returns what a checkpoint holds: the state, and beside it the data position of the rows of all hosts.

    Args:
        plan: the step's.
        state: on the devices.
        position: int32 [rows, S, 2], of this host's rows after the state's last step.
        rows: which of the global batch they are.
        global_batch: B.
    """
    at = {"data_position": plan.layout.sharding(("batch", None, None))}
    return {**_saved_state(plan, state), **to_global({"data_position": position}, at, rows, global_batch)}


def abstract_entries(plan: StepPlan, abstract: TrainState) -> dict[str, Any]:
    """Returns what to restore of a checkpoint; the data position whole on each host, of however many rows it has."""
    return {**_saved_state(plan, abstract), "data_position": HostArray(plan.layout.sharding(()))}


def _saved_state(plan: StepPlan, state: TrainState) -> dict[str, Any]:
    """Returns the entries of a state that are saved: of adapters not the weights that they are trained on."""
    entries = state.by_name()
    if plan.lora:
        del entries["frozen"]
    return entries


def saved_meta(config: Config, fingerprint: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
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
    return plan.split(weights).frozen


def all_weights(abstract: TrainState) -> Tree:
    """The model's weights, whatever part of the state they are in, without adapters."""
    return {name: entry for name, entry in abstract.weights.merged().items() if name != "lora"}


def state_of(weights: Tree, config: Config, plan: StepPlan, abstract: TrainState) -> TrainState:
    """The state before the first step of a run that starts from these weights."""
    loaded = plan.split(weights)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def rest(loaded: Weights) -> TrainState:
        """Adds all that a new state has and `loaded` lacks: adapters, the optimizer's arrays."""
        adapters = {"lora": plan.init_adapters()} if plan.lora else {}
        loaded = dataclasses.replace(loaded, trainable=join(loaded.trainable, adapters))
        return init_state(plan, hparams_at(config, 0), loaded)

    return jax.jit(rest, out_shardings=shardings, donate_argnums=0)(loaded)


def new_state(config: Config, plan: StepPlan, abstract: TrainState) -> TrainState:
    """The state before the first step, made where it belongs, the same on every mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    init = functools.partial(init_state, plan, hparams_at(config, 0))
    # It runs once: XLA's CPU backend takes six times as long to optimise the random numbers as to compile them plainly.
    return jax.jit(init, out_shardings=shardings, compiler_options={"xla_backend_optimization_level": 0})()


def compare_configs(config: Config, saved: str, plan: StepPlan, abstract: TrainState) -> Messages:
    """What changed since the run's own config.yml.

    Raises:
        UserError: a change alters weights or data, and `accept_changes` does not name it.
    """
    old = from_yaml(saved)
    harmless, breaking = compare_runs(old, config)
    if breaking:
        listed = "\n".join(f"  {change}" for change in breaking)
        accept = f", or accept them: accept_changes=[{', '.join(change.key for change in breaking)}]"
        if not _same_arrays(Config.of({key: old[key] for key in old if key in KEYS}), plan, abstract):
            accept = ": checkpoints have arrays of the old shapes, which do not fit these"
        raise UserError(
            f"This run was started with other settings of its weights or data (old -> new):\n{listed}\n"
            f"Give them as they were, or use another run_name{accept}"
        )
    return [f"changed since the run's last start: {change}" for change in harmless]


def _same_arrays(old: Config, plan: StepPlan, abstract: TrainState) -> bool:
    """Whether the state of a run's old configuration has arrays of the same names and shapes."""

    def shapes(state: TrainState) -> dict[str, tuple[int, ...]]:
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

    try:
        old_plan = make_plan(old, model_spec(old), plan.layout)
        return shapes(abstract_state(old_plan, old)) == shapes(abstract)
    except UserError:  # it does not divide over this mesh
        return False


def check_vocabulary(config: Config, meta: Mapping[str, Any]) -> None:
    """Raises UserError where a checkpoint's vocabulary is another one, which padding would hide."""
    if meta["vocab_size"] != config.vocab_size:
        raise UserError(
            f"the checkpoint's vocab_size is {meta['vocab_size']}, and this configuration's is {config.vocab_size}: "
            "set vocab_size to the checkpoint's"
        )


def check_tokenizer(config: Config, meta: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
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
    config: Config,
    fingerprint: Mapping[str, Any],
) -> Start:
    """The restored state, if it stands in the data that the config describes.

    Where the user accepts another global batch size, row length or mixture, each source goes on after as many
    documents, or rows of tokens, as were taken of it.

    Raises:
        UserError: the data differ, and `accept_changes` does not say that they may.
    """
    old = meta["data"]
    sources = {*source_names(meta), *(spec.name for spec in train_specs(config))}
    facts = {name: Fact.of(name, sources) for name in {**old, **fingerprint}}
    # Files were not listed one by one before; where both lists are there they say which file it is.
    lists_files = all(any(facts[name].is_file for name in listing) for listing in (old, fingerprint))
    different = [
        name
        for name, fact in facts.items()
        if old.get(name) != fingerprint.get(name)
        and (lists_files or not fact.is_file)
        and (name in old or fact.source is None or fact.name != "contents")  # which older checkpoints do not know
    ]
    accepting = {name: accepted_by(name, facts[name]) for name in different}
    refused = [name for name in different if not set(config.accept_changes).intersection(accepting[name])]
    if refused:
        listed = first_few((f"  {name}: {old.get(name)} -> {fingerprint.get(name)}" for name in refused), "\n")
        keys = ", ".join(dict.fromkeys(accepting[name][0] for name in refused))
        raise UserError(
            f"The checkpoint stands in other data than the config describes (old -> new):\n{listed}\n"
            f"Restore the data, or accept that examples repeat or are missed: accept_changes=[{keys}]"
        )
    accepted = [f"accepted: {name}: {old.get(name)} -> {fingerprint.get(name)}" for name in different]
    position, told = moved_position(fields["data_position"], meta, config, fingerprint["global batch"])
    rows_taken, rows_before = rows_consumed(int(fields["step"]), meta, config, fingerprint)
    eval_position = meta.get("eval_position", {})
    return Start(TrainState.of(fields), position, rows_taken, rows_before, eval_position, [*accepted, *told])


def moved_position(
    position: np.ndarray, meta: Mapping[str, Any], config: Config, rows: int
) -> tuple[np.ndarray, Messages]:
    """The packing streams' saved position [B, S, 2] for the sources and the number of rows that there now are."""
    old_names, names = source_names(meta), [spec.name for spec in train_specs(config)]
    if old_names == names and len(position) == rows:
        return position, []
    new = [name for name in names if name not in old_names]
    messages = [f"the data of {name or 'the run'} begin at their start" for name in new]
    columns = [np.zeros_like(position[:, 0]) if name in new else position[:, old_names.index(name)] for name in names]
    if rows != len(position):
        taken = sum(int(documents_consumed(column).sum()) for column in columns)
        messages.append(f"the global batch changed: the data go on after {taken:,} documents")
        columns = [remap_position(column, rows) for column in columns]
    return np.stack(columns, axis=1), messages


def rows_consumed(
    step: int, meta: Mapping[str, Any], config: Config, fingerprint: Mapping[str, Any]
) -> tuple[int, dict[str, int]]:
    """Counts the rows since weights, batch and row length were last changed; and those of each source before that.

    After a change the mixture's schedule begins anew, and what needs no packing stream goes on after its own rows: of
    tokens after as many of them, where the length of a row changed.
    """
    old = meta["data"]
    names, weights = source_names(meta), meta.get("mixture", {"weights": [1.0]})["weights"]
    taken = meta.get("rows_taken", step * old["global batch"])
    before = meta.get("rows_before", {})
    now = ([spec.name for spec in train_specs(config)], list(train_weights(config)))
    sizes = ("global batch", "max_target_length")
    if (names, weights) == now and all(old[size] == fingerprint[size] for size in sizes):
        return taken, dict(before)
    mixture = Mixture(weights)
    rows = {name: before.get(name, 0) + mixture.count(index, taken) for index, name in enumerate(names)}
    if config.packing:  # else a row is a document, whatever its length
        lengths = old["max_target_length"], fingerprint["max_target_length"]
        rows = {name: count * lengths[0] // lengths[1] for name, count in rows.items()}
    return 0, rows


def source_names(meta: Mapping[str, Any]) -> list[str]:
    """The names of the sources that a checkpoint's positions are of."""
    return meta.get("mixture", {"names": [""]})["names"]


def accepted_by(entry: str, fact: Fact) -> tuple[str, ...]:
    """The keys of which `accept_changes` has to name one, where an entry of the data's fingerprint has changed."""
    if entry in ACCEPTED_BY:
        return ACCEPTED_BY[entry]
    return ("datasets", *SOURCE_KEYS) if fact.source and not fact.is_file else SOURCE_KEYS
