"""Finds where a run starts: at its own checkpoint, at another run's, or anew."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.data_position import TOKENIZER_KEYS, DataPosition, data_position
from src.checkpoint.load_weights import check_base, identity, load_weights
from src.checkpoint.restore import HostArray, restore_step
from src.checkpoint.run_folder import RunFolder, absolute
from src.config.load import compare_runs, from_yaml
from src.config.schema import KEYS, Config
from src.data.host_arrays import rows_to_global
from src.data.types import Tokenizer
from src.errors import UserError
from src.model.params import Tree, Weights, join
from src.model.spec import model_spec
from src.step.plan import StepPlan, make_plan
from src.step.state import TrainState, abstract_state, init_state


class ResumePoint(NamedTuple):
    """Describes where a run goes on, or begins."""

    state: TrainState
    messages: list[str]  # for the user
    position: DataPosition = DataPosition()  # in the training data
    eval_position: Mapping[str, Any] = {}  # of each rolling evaluation set by name, as `EvalBatches.position` gave it
    resumed: bool = False  # from the run's own checkpoint


def starting_state(
    config: Config,
    plan: StepPlan,
    abstract: TrainState,
    folder: RunFolder,
    checkpointer: Checkpointer,
    fingerprint: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> ResumePoint:
    """Returns the state to go on from, its place in the data, and messages for the user.

    Raises:
        UserError: the run has no good checkpoint, is resumed with another model or other data than it had, or begins
            with weights that were trained with another tokenizer.
    """
    saved_config = folder.read_text("config.yml")
    if (folder.path / "checkpoints").exists():
        if not config.enable_checkpointing:
            raise UserError(
                f"{folder.path} has checkpoints, which a run with enable_checkpointing=false would neither use nor "
                "keep up. Use another run_name."
            )
        changes = ["the run's config.yml is missing or empty: nobody can tell what has changed since its last start"]
        if saved_config:
            changes = compare_configs(config, saved_config, plan, abstract)
        restored = checkpointer.restore_latest(abstract_entries(plan, abstract))
        if restored is not None:
            entries, meta, messages = restored
            if plan.lora:
                entries["frozen"] = base_weights(plan, abstract, meta, config.load_parameters_path)
            messages = [*changes, *messages, f"resumed from step {int(entries['step'])}"]
            return _resume_point(entries, meta, config, fingerprint, messages, resumed=True)
    if path := config.load_full_state_path:
        # src/config/checks.py refuses adapters here: load_parameters_path, which says where their base is, is not set.
        wanted = abstract_entries(plan, abstract)
        entries, meta, messages = restore_step(path, wanted)
        check_vocabulary(config, meta)
        return _resume_point(entries, meta, config, fingerprint, messages)
    if config.load_parameters_path:
        weights, meta, messages = load_weights(config.load_parameters_path, all_weights(abstract))
        check_vocabulary(config, meta)
        check_tokenizer(config, meta, tokenizer)
        return ResumePoint(state_of(weights, plan, abstract), messages)
    return ResumePoint(new_state(plan, abstract), [])


def _resume_point(
    entries: Mapping[str, Any],
    meta: Mapping[str, Any],
    config: Config,
    fingerprint: Mapping[str, Any],
    messages: list[str],
    resumed: bool = False,
) -> ResumePoint:
    position, moved = data_position(int(entries["step"]), entries["data_position"], meta, config, fingerprint)
    eval_position = meta.get("eval_position", {})
    return ResumePoint(TrainState.of(entries), [*messages, *moved], position, eval_position, resumed)


# ---- What a checkpoint holds


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
    sharding = plan.layout.sharding(("batch", None, None))
    return {**_saved_state(plan, state), "data_position": rows_to_global(position, sharding, rows, global_batch)}


def abstract_entries(plan: StepPlan, abstract: TrainState) -> dict[str, Any]:
    """Returns what to restore of a checkpoint; the data position whole on each host, with however many rows it has."""
    return {**_saved_state(plan, abstract), "data_position": HostArray(plan.layout.sharding(()))}


def _saved_state(plan: StepPlan, state: TrainState) -> dict[str, Any]:
    """Returns the entries of a state that are saved; with adapters, the weights under them are not."""
    entries = state.by_name()
    if plan.lora:
        del entries["frozen"]
    return entries


def saved_meta(config: Config, fingerprint: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns what a checkpoint says about itself beside its arrays."""
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


# ---- States


def base_weights(plan: StepPlan, abstract: TrainState, meta: Mapping[str, Any], path: str) -> Tree:
    """Loads the frozen weights at `path`, which a checkpoint of adapters leaves out.

    Raises:
        UserError: the adapters were trained on other weights.
    """
    check_base(meta["lora"], path)
    weights, _, _ = load_weights(path, all_weights(abstract))
    return plan.split(weights).frozen


def all_weights(abstract: TrainState) -> Tree:
    """Returns the model's weights of every role, without adapters."""
    return {name: entry for name, entry in abstract.weights.merged().items() if name != "lora"}


def state_of(weights: Tree, plan: StepPlan, abstract: TrainState) -> TrainState:
    """Returns the state before the first step of a run that starts from these weights; donates them."""

    def complete(loaded: Weights) -> TrainState:
        adapters = {"lora": plan.init_adapters()} if plan.lora else {}
        loaded = dataclasses.replace(loaded, trainable=join(loaded.trainable, adapters))
        return init_state(plan, loaded)

    return jax.jit(complete, out_shardings=_shardings(abstract), donate_argnums=0)(plan.split(weights))


def new_state(plan: StepPlan, abstract: TrainState) -> TrainState:
    """Returns the state before the first step of a new run, created with its shardings, the same on every mesh."""
    init = functools.partial(init_state, plan)
    # It runs once: XLA's CPU backend takes six times as long to optimise the random numbers as to compile them plainly.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(init, out_shardings=_shardings(abstract), compiler_options=options)()


def _shardings(abstract: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


# ---- What may not have changed


def compare_configs(config: Config, saved: str, plan: StepPlan, abstract: TrainState) -> list[str]:
    """Returns a line for each change since the run's own config.yml.

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
    """Returns whether the state of an old configuration has arrays of the same names and shapes."""

    def shapes(state: TrainState) -> dict[str, tuple[int, ...]]:
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

    try:
        old_plan = make_plan(old, model_spec(old.model, old.step, old.batch.max_target_length), plan.layout)
        return shapes(abstract_state(old_plan)) == shapes(abstract)
    except UserError:  # it does not divide over this mesh
        return False


def check_vocabulary(config: Config, meta: Mapping[str, Any]) -> None:
    """Raises UserError if a checkpoint has another vocabulary size, which padding would hide."""
    if meta["vocab_size"] != config.vocab_size:
        raise UserError(
            f"the checkpoint's vocab_size is {meta['vocab_size']}, and this configuration's is {config.vocab_size}: "
            "set vocab_size to the checkpoint's"
        )


def check_tokenizer(config: Config, meta: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
    """Raises UserError if a checkpoint was trained with another tokenizer, unless `accept_changes` allows it.

    Older checkpoints and those trained on synthetic data have no tokenizer on record.
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
