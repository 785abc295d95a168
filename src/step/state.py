"""The state of a run and a batch of its rows: their shapes, and where each array lies."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from src.errors import UserError
from src.model.pipeline import check_rows
from src.parallel.mesh import Layout
from src.parallel.sequence import sharing_keys, zigzag_order
from src.step.optimizer import Hyper, hyper_parameters, state_shardings, transform
from src.step.plan import WEIGHTS, Batch, StepPlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run is at one step; a checkpoint holds just this."""

    step: jax.Array  # int32: updates done or skipped
    trainable: Any
    frozen: Any  # weights without gradient or optimizer state
    stats: Any  # values that the forward pass, not the gradient, updates
    opt: Any
    data_position: jax.Array  # int32 [B, sources, 2], of the rows after this step's (src/data/packing.py)


def state_weights(state: TrainState) -> tuple[Any, ...]:
    """The parts of a state that make up the model, as `StepPlan.decoder` takes them."""
    return tuple(getattr(state, part) for part in WEIGHTS)


def init_state(
    plan: StepPlan, hyper: Hyper, position_shape: tuple[int, ...], parts: dict[str, Any] | None = None
) -> TrainState:
    """The state before the first step, with the weights `parts`; None: the initial ones."""
    parts = parts or plan.init_weights()
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        opt=optimizer(plan, hyper).init(parts["trainable"]),
        data_position=jnp.zeros(position_shape, jnp.int32),
        **parts,
    )


def optimizer(plan: StepPlan, hyper: Hyper) -> optax.GradientTransformation:
    """The plan's, with these values for this step."""
    decays, matrix = (plan.by_part(tree)["trainable"] for tree in (plan.decays, plan.matrices))
    return transform(plan.opt_type, plan.mu_dtype, decays, matrix, plan.update_shardings(), hyper)


def abstract_state(plan: StepPlan, config: Mapping[str, Any], position_shape: tuple[int, ...]) -> TrainState:
    """The state's shapes and shardings, without an array: `jax.ShapeDtypeStruct`s."""
    hyper = hyper_parameters(config, 0)
    shapes = jax.eval_shape(functools.partial(init_state, plan, hyper, position_shape))
    copy = plan.layout.sharding(())
    shardings = TrainState(
        step=copy,
        opt=optimizer_shardings(plan, shapes.opt),
        data_position=plan.layout.sharding(("batch", None, None)),
        **plan.by_part(plan.shardings),
    )
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)


def optimizer_shardings(plan: StepPlan, opt: Any) -> Any:
    """Where the optimizer's state lies between updates: as the weights' updates are cut, or copied."""
    weights = plan.update_shardings()
    if plan.offload_optimizer:
        weights = jax.tree.map(lambda at: at.with_memory_kind("pinned_host"), weights)
    return state_shardings(opt, weights, plan.layout.sharding(()))


def batch_sharding(layout: Layout) -> dict[str, jax.sharding.NamedSharding]:
    """The placement of each array of a batch."""
    rows = layout.sharding(("batch", None))  # whole, as the sequence's order over a context axis is the step's own
    names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    return {**dict.fromkeys(names, rows), "data_position": layout.sharding(("batch", None, None))}


def abstract_batch(plan: StepPlan, position_shape: tuple[int, int, int], length: int) -> Batch:
    """The shapes and shardings of a batch of rows of `length` tokens, without an array: `jax.ShapeDtypeStruct`s.

    `position_shape` is `data_position`'s: rows, sources and 2.

    Raises:
        UserError: they do not divide over the mesh.
    """
    rows = position_shape[0]
    plan.layout.check((rows,), ("batch",))
    zigzag_order(length, plan.layout)
    if length % plan.layout.shards("norm_length"):
        keys = sharing_keys(plan.layout, "norm_length", "or")
        raise UserError(
            f"max_target_length={length} is not divisible by the number of devices that share a row between blocks "
            f"({plan.layout.sharded_by('norm_length')}): use a multiple of {plan.layout.shards('norm_length')}, or "
            f"another {keys}"
        )
    check_rows(rows // plan.micro_batches, plan.layout, plan.execution.schedule, "per_device_batch_size")
    if length % (plan.vocab_tiles * plan.layout.shards("norm_length")):
        raise UserError(
            f"max_target_length={length} does not divide into num_vocab_tiling={plan.vocab_tiles} tiles on each of the "
            f"devices that share a row ({plan.layout.sharded_by('norm_length')})"
        )
    place = batch_sharding(plan.layout)
    shapes = {name: position_shape if name == "data_position" else (rows, length) for name in place}
    dtypes = {name: jnp.float32 if name == "loss_mask" else jnp.int32 for name in place}
    return {name: jax.ShapeDtypeStruct(shapes[name], dtypes[name], sharding=place[name]) for name in place}
