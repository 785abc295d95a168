"""Gradients of a step whose rows go through in micro-batches: added up where they are made, reduced once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from src.mesh import Layout

Rows = dict[str, jax.Array]


def accumulate(
    gradient: Callable[[Any, Rows, jax.Array | None], Any],
    weights: Any,
    rows: Rows,
    key: jax.Array | None,
    micro_batches: int,
    layout: Layout,
    copied: tuple[str, ...],
) -> Any:
    """The sum over micro-batches of what `gradient(weights, rows, key)` returns; of several in float32.

    A reduction over the mesh axes `copied` waits for the last micro-batch: along them devices have copies of the
    weights, and add up gradients of their own rows. (Between slices that is the step's one large transfer.) Over the
    other axes each micro-batch's gradients are reduced at once, to the shards that their weights have.

    Args:
        gradient: of a micro-batch; a tree of sums over its rows.
        weights: what it takes beside the rows, whole along `copied`.
        rows: arrays [B, ...].
        key: of dropout; each micro-batch and each part of `copied` draws its own. None: none.
        micro_batches: their number, a divisor of B over the shards of the batch.
        layout: of the mesh.
        copied: mesh axes that shard the rows and no weight.
    """

    def add_up(weights: Any, rows: Rows, key: jax.Array | None) -> Any:
        if key is not None and copied:
            key = jax.random.fold_in(key, jax.lax.axis_index(copied))
        if micro_batches == 1:
            return reduced(gradient(weights, rows, key))

        def add_micro_batch(total: Any, micro: tuple[Rows, jax.Array]) -> tuple[Any, None]:
            rows, index = micro
            micro_key = None if key is None else jax.random.fold_in(key, index)
            return jax.tree.map(jnp.add, total, gradient(weights, rows, micro_key)), None

        parts = {name: layout.split_rows(x, micro_batches, *[None] * (x.ndim - 1)) for name, x in rows.items()}
        micro = (parts, jnp.arange(micro_batches))
        first = jax.tree.map(lambda x: x[0], micro[0])
        shapes = jax.eval_shape(gradient, weights, first, key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
        total, _ = jax.lax.scan(add_micro_batch, zeros, micro)
        return reduced(total)

    def reduced(total: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.psum(x.astype(jnp.float32), copied), total) if copied else total

    if copied:
        whole, shared_out = PartitionSpec(), PartitionSpec(copied)
        add_up = layout.shard_map(add_up, in_specs=(whole, shared_out, whole), out_specs=whole, over=copied)
    return add_up(weights, rows, key)
