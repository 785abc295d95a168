"""The step that a configuration means on given devices: the same one for training and for compiling ahead of time."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from src.config.schema import Config
from src.data.batch_schedule import BatchSchedule
from src.model.spec import model_spec
from src.model.vocab_tiles import vocab_tiles
from src.parallel.mesh import Layout, global_batch_size, make_layout
from src.step.loss import next_token_loss
from src.step.optimizer import HParams, hparams_at
from src.step.plan import Batch, StepPlan, make_plan
from src.step.state import TrainState, abstract_batch, abstract_state
from src.step.train_step import compile_steps


class TracedStep(NamedTuple):
    """A step that is traced but not compiled, and what it is called with: `jax.ShapeDtypeStruct`s with shardings."""

    plan: StepPlan
    compiler_options: Mapping[str, str]  # XLA's, of `train`
    state: TrainState
    batch: Batch
    hparams: HParams
    train: jax.stages.Wrapped
    eval: jax.stages.Wrapped
    traced: jax.stages.Traced
    schedule: BatchSchedule  # `batch` and `traced` are of its full size

    @property
    def rows(self) -> int:
        """Counts the rows of the global batch, at the end of a ramp."""
        return self.batch["tokens"].shape[0]

    @property
    def tokens(self) -> int:
        """Counts the tokens of the global batch, padding included."""
        return self.batch["tokens"].size


def build(
    config: Config,
    devices: Sequence[jax.Device],
    compiler_options: Mapping[str, str] = {},
    fields: Mapping[str, jax.ShapeDtypeStruct] = {},
) -> TracedStep:
    """Traces a checked config's step; raises UserError if it does not fit devices or mesh, or a user's functions.

    Batches have `fields` too, beside those that the config gives them.
    """
    plan = plan_step(config, make_layout(config.mesh, devices))
    plan = dataclasses.replace(plan, fields={**plan.fields, **fields})

    def rows_of(per_device: float, key: str) -> int:
        rows = global_batch_size(plan.layout, per_device, config.gradient_accumulation_steps, key)
        abstract_batch(plan, rows, config.max_target_length, key)  # raises where they do not divide
        return rows

    schedule = BatchSchedule.of(config.batch, rows_of, plan.layout.shards("batch"))
    state, batch = abstract_state(plan), abstract_batch(plan, schedule.rows, config.max_target_length)
    hparams = hparams_at(config.step, config.steps, 0)
    loss = next_token_loss
    if config.step.loss:
        from src.step.user_loss import loss_function

        loss = loss_function(config.step.loss)
    train, evaluate = compile_steps(plan, state, compiler_options, loss)
    traced = train.trace(state, batch, hparams)
    if plan.eval_metrics:  # a mistake in it ends the run here, not at its first evaluation
        evaluate.eval_shape(state.weights, batch)
    return TracedStep(plan, compiler_options, state, batch, hparams, train, evaluate, traced, schedule)


def plan_step(config: Config, layout: Layout) -> StepPlan:
    """Returns the plan of a checked config's step; raises what `make_plan` raises."""
    spec = model_spec(config.model, config.step, config.max_target_length)
    tiles = vocab_tiles(config.step, config.batch, spec, layout)
    step = dataclasses.replace(config.step, num_vocab_tiling=tiles)
    return make_plan(spec, layout, step, config.mesh, config.batch, config.eval_metrics)
