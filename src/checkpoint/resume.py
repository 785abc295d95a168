"""Starts a run from its own checkpoint, from another run's, or from the beginning."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.contents import saved_entries
from src.checkpoint.format import HostArray, Restored
from src.data.types import START, DataPosition, InputSpec
from src.model.params import Tree, by_path, join
from src.step.plan import StepPlan
from src.step.state import TrainState, init_state


class ResumePoint(NamedTuple):
    """The state, and the positions in the data, with which a run resumes or begins."""

    state: TrainState
    messages: list[str]  # for the user
    position: DataPosition = START  # in the training data
    eval_position: Mapping[str, Any] = {}  # `EvalBatches.position` of each rolling evaluation set, by name
    resumed: bool = False  # from the run's own checkpoint
    eval_loss: float | None = None  # at the state's step, the highest over evaluation sets; None: not evaluated
    evaluation_due: bool = False  # whether the run had still to evaluate at the state's step


def starting_state(
    inputs: InputSpec,
    accept_changes: Sequence[str],
    plan: StepPlan,
    abstract: TrainState,
    checkpointer: Checkpointer,
    fingerprint: Mapping[str, Any],
) -> ResumePoint:
    """Restores or initialises the state; also finds where it continues in the data of `fingerprint`.

    Raises as `restore_latest` does, and UserError if a run is resumed with different data or base weights, or begins
    with weights that could not be loaded, or were trained with another vocabulary or tokenizer.
    """
    loading = inputs.config.checkpoint
    wanted = {**saved_entries(plan, abstract), "data_position": HostArray(plan.layout.sharding(()))}
    if restored := checkpointer.restore_latest(wanted):
        if plan.step.lora_rank:  # a checkpoint of adapters lacks the base weights
            from src.checkpoint.load_weights import load_base

            weights = load_base(loading, restored.meta["lora"], all_weights(abstract))
            restored.state["frozen"] = plan.split(weights).frozen
        restored.messages.append(f"resumed from step {int(restored.state['step'])}")
        point = _resume_point(restored, inputs, accept_changes, fingerprint)
        due = "eval_loss" not in restored.meta and restored.meta.get("evaluation_due", False)
        return point._replace(resumed=True, eval_loss=restored.meta.get("eval_loss"), evaluation_due=due)
    if path := loading.load_full_state_path:
        from src.checkpoint.load_weights import load_state

        restored = load_state(path, wanted, plan.spec.vocab_size)
        return _resume_point(restored, inputs, accept_changes, fingerprint)
    if not (loading.load_parameters_path or loading.load_weights_rules):
        return ResumePoint(new_state(plan, abstract), [])
    from src.checkpoint.initial_weights import initial_weights

    weights, messages = initial_weights(inputs, accept_changes, all_weights(abstract), plan.axes)
    return ResumePoint(new_state(plan, abstract, weights), messages)


def _resume_point(
    restored: Restored, inputs: InputSpec, accept_changes: Sequence[str], fingerprint: Mapping[str, Any]
) -> ResumePoint:
    from src.checkpoint.data_position import data_position

    entries, meta, messages = restored
    step, streams = int(entries["step"]), entries["data_position"]
    position, moved = data_position(step, streams, meta, inputs.data, accept_changes, fingerprint)
    return ResumePoint(TrainState.of(entries), [*messages, *moved], position, meta.get("eval_position", {}))


# ---- States


def all_weights(abstract: TrainState) -> Tree:
    """Selects all of the model's weights, trainable, frozen and statistics, but not adapters."""
    return {name: entry for name, entry in abstract.weights.merged().items() if name != "lora"}


def new_state(plan: StepPlan, abstract: TrainState, weights: Mapping[str, Any] = {}) -> TrainState:
    """Initialises the state before the first step, the same on every mesh; donated `weights` replace initial ones."""
    whole = len(by_path(weights)) == len(by_path(all_weights(abstract)))

    def init(loaded: Tree) -> TrainState:
        initial = {} if whole else plan.init_weights().merged()
        adapters = {"lora": plan.init_adapters()} if plan.step.lora_rank else {}
        return init_state(plan, plan.split(join(initial, loaded, adapters)))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # It runs once: XLA's CPU backend takes six times as long to optimise the random numbers as to compile them plainly.
    options = None if whole else {"xla_backend_optimization_level": 0}
    return jax.jit(init, out_shardings=shardings, donate_argnums=0, compiler_options=options)(weights)
