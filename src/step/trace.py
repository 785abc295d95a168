"""Builds the step of a configuration on given devices: the same for training and ahead-of-time compilation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from src.config.schema import Config
from src.data.batch_schedule import BatchSchedule
from src.model.spec import model_spec
from src.model.vocab_tiles import vocab_tiles
from src.parallel.mesh import MeshLayout, global_batch_size, make_layout
from src.step.loss import next_token_loss
from src.step.optimizer import HParams, hparams_at
from src.step.plan import Batch, StepPlan, make_plan
from src.step.state import TrainState, abstract_batch, abstract_state
from src.step.train_step import compile_steps


class TracedTrainStep(NamedTuple):
    """A traced but not compiled step, with its abstract arguments: `jax.ShapeDtypeStruct`s with shardings."""

    plan: StepPlan
    compiler_options: Mapping[str, str]  # XLA's, for `train`
    state: TrainState
    batch: Batch
    hparams: HParams
    train: jax.stages.Wrapped
    eval: jax.stages.Wrapped
    jax_traced: jax.stages.Traced
    schedule: BatchSchedule  # `batch` and `jax_traced` have its full size

    @property
    def rows(self) -> int:
        """Sequences in the global batch, at the end of a ramp."""
        return self.batch["tokens"].shape[0]

    @property
    def tokens(self) -> int:
        """Tokens in the global batch, including padding."""
        return self.batch["tokens"].size


def trace_train_step(
    config: Config,
    devices: Sequence[jax.Device],
    compiler_options: Mapping[str, str] = {},
    fields: Mapping[str, jax.ShapeDtypeStruct] = {},
) -> TracedTrainStep:
    """Traces a checked config's step; raises UserError if devices, mesh or a user's functions do not fit it.

    `fields` are added to the arrays of a batch that the config defines.
    """
    plan = plan_step(config, make_layout(config.mesh, devices))
    plan = dataclasses.replace(plan, fields={**plan.fields, **fields})

    def rows_of(per_device: float, key: str) -> int:
        rows = global_batch_size(plan.layout, per_device, config.step.gradient_accumulation_steps, key)
        abstract_batch(plan, rows, config.batch.max_target_length, key)  # raises if they are not divisible
        return rows

    schedule = BatchSchedule.of(config.batch, rows_of, plan.layout.shards("batch"))
    state, batch = abstract_state(plan), abstract_batch(plan, schedule.rows, config.batch.max_target_length)
    hparams = hparams_at(config.step, config.run.steps, 0)
    loss = next_token_loss
    if config.step.loss:
        from src.step.user_loss import loss_function

        loss = loss_function(config.step.loss)
    train, evaluate = compile_steps(plan, state, compiler_options, loss)
    jax_traced = train.trace(state, batch, hparams)
    if plan.eval_metrics:  # raise its errors now, not at the first evaluation
        jax.eval_shape(evaluate, state.weights, batch)
    return TracedTrainStep(plan, compiler_options, state, batch, hparams, train, evaluate, jax_traced, schedule)


def plan_step(config: Config, layout: MeshLayout) -> StepPlan:
    """Plans a checked config's step; raises as `make_plan` does."""
    spec = model_spec(config.model, config.step, config.batch.max_target_length)
    tiles = vocab_tiles(config.step, config.batch, spec, layout)
    step = dataclasses.replace(config.step, num_vocab_tiling=tiles)
    return make_plan(spec, layout, step, config.mesh, config.batch, config.evaluation.eval_metrics)
