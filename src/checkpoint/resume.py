"""Finds where a run starts: at its own checkpoint, at another run's, or anew."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from src.checkpoint.agreement import of_process_0
from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.contents import saved_entries
from src.checkpoint.format import DataPosition, HostArray, Restored
from src.checkpoint.run_folder import absolute, steps_in
from src.config.schema import Checkpoint, Data, Run
from src.data.rules import PRESENT_RULES, RULES_FACT, rules_of
from src.data.types import Tokenizer
from src.model.params import Tree, by_path, join
from src.step.plan import StepPlan
from src.step.state import TrainState, init_state
from src.system.errors import UserError


class ResumePoint(NamedTuple):
    """Where a run goes on, or begins."""

    state: TrainState
    messages: list[str]  # for the user
    position: DataPosition = DataPosition()  # in the training data
    eval_position: Mapping[str, Any] = {}  # of each rolling evaluation set by name, as `EvalBatches.position` gave it
    resumed: bool = False  # from the run's own checkpoint
    eval_loss: float | None = None  # of the evaluation at that step, the highest of its sets
    evaluation_due: bool = False  # at that step, which the run had not made


def starting_state(
    loading: Checkpoint,
    data: Data,
    accept_changes: Sequence[str],
    plan: StepPlan,
    abstract: TrainState,
    checkpointer: Checkpointer,
    fingerprint: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> ResumePoint:
    """Returns the state to go on from, its place in the data of `fingerprint`, and messages for the user.

    Raises UserError if the run has no good checkpoint, is resumed with another model or other data than it had, or
    begins with weights that were trained with another tokenizer.
    """
    wanted = {**saved_entries(plan, abstract), "data_position": HostArray(plan.layout.sharding(()))}
    if restored := checkpointer.restore_latest(wanted):
        if plan.step.lora_rank:  # a checkpoint of adapters leaves the weights under them out
            from src.checkpoint.load_weights import check_base, load_weights

            check_base(restored.meta["lora"], loading.load_parameters_path, loading.load_ema)
            weights, _, _ = load_weights(loading.load_parameters_path, all_weights(abstract), loading.load_ema)
            restored.state["frozen"] = plan.split(weights).frozen
        restored.messages.append(f"resumed from step {int(restored.state['step'])}")
        point = _resume_point(restored, data, accept_changes, fingerprint)
        due = "eval_loss" not in restored.meta and restored.meta.get("evaluation_due", False)
        return point._replace(resumed=True, eval_loss=restored.meta.get("eval_loss"), evaluation_due=due)
    if path := loading.load_full_state_path:
        from src.checkpoint.load_weights import check_vocabulary
        from src.checkpoint.restore import restore_any

        # src/config/checks.py refuses adapters here: load_parameters_path, which says where their base is, is not set.
        restored = restore_any(path, lambda meta, saved: wanted, ", ".join(wanted))
        check_vocabulary(plan.spec.vocab_size, restored.meta)
        return _resume_point(restored, data, accept_changes, fingerprint)
    if not (loading.load_parameters_path or loading.load_weights_rules):
        return ResumePoint(new_state(plan, abstract), [])
    from src.checkpoint.load_weights import check_tokenizer, check_vocabulary, load_by_rules, load_weights

    whole, ema = all_weights(abstract), loading.load_ema
    by_rules, metas, messages = load_by_rules(loading.load_weights_rules, whole, plan.axes, ema)
    weights = by_rules
    if path := loading.load_parameters_path:
        weights, meta, notes = load_weights(path, whole, ema)
        metas, messages, weights = [meta, *metas], [*notes, *messages], join(weights, by_rules)
    for meta in metas:
        check_vocabulary(plan.spec.vocab_size, meta)
        check_tokenizer(accept_changes, meta, tokenizer)
    return ResumePoint(new_state(plan, abstract, weights), messages)


def _resume_point(
    restored: Restored, data: Data, accept_changes: Sequence[str], fingerprint: Mapping[str, Any]
) -> ResumePoint:
    from src.checkpoint.data_position import data_position

    entries, meta, messages = restored
    step, streams = int(entries["step"]), entries["data_position"]
    position, moved = data_position(step, streams, meta, data, accept_changes, fingerprint)
    return ResumePoint(TrainState.of(entries), [*messages, *moved], position, meta.get("eval_position", {}))


def run_rules(run: Run, loading: Checkpoint) -> int:
    """Returns the version of the rules of data (src/data/rules.py) that a run keeps; every process calls it.

    That is its newest checkpoint's, or `load_full_state_path`'s; a new run has the present ones. Raises UserError for
    one that only a later MinText knows.
    """
    own = absolute(f"{run.base_output_directory}/{run.run_name}/checkpoints")
    has_own = run.run_name and of_process_0(lambda: steps_in(own))
    if not (path := own if has_own else loading.load_full_state_path) or "data_rules" in run.accept_changes:
        return PRESENT_RULES
    from src.checkpoint.restore import newest_meta

    facts = newest_meta(path).get("data", {RULES_FACT: PRESENT_RULES})  # none: weights from elsewhere
    if (version := rules_of(facts)) > PRESENT_RULES:
        raise UserError(f"{path} has rules of data of version {version}: use the MinText that wrote it, or a later one")
    return version


# ---- States


def all_weights(abstract: TrainState) -> Tree:
    """Returns the model's weights of every role, without adapters."""
    return {name: entry for name, entry in abstract.weights.merged().items() if name != "lora"}


def new_state(plan: StepPlan, abstract: TrainState, weights: Mapping[str, Any] = {}) -> TrainState:
    """Returns the state before the first step, the same on every mesh: initial but for `weights`, which are donated."""
    whole = len(by_path(weights)) == len(by_path(all_weights(abstract)))

    def init(loaded: Tree) -> TrainState:
        initial = {} if whole else plan.init_weights().merged()
        adapters = {"lora": plan.init_adapters()} if plan.step.lora_rank else {}
        return init_state(plan, plan.split(join(initial, loaded, adapters)))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # It runs once: XLA's CPU backend takes six times as long to optimise the random numbers as to compile them plainly.
    options = None if whole else {"xla_backend_optimization_level": 0}
    return jax.jit(init, out_shardings=shardings, donate_argnums=0, compiler_options=options)(weights)
