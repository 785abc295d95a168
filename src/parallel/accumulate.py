"""Gradients of a step whose rows go through in micro-batches: added up where they are made, reduced once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from src.parallel.mesh import Layout

Rows = dict[str, jax.Array]


def accumulate(
    gradient: Callable[[Any, Rows], tuple[Any, Any]],
    weights: Any,
    rows: Rows,
    micro_batches: int,
    layout: Layout,
    copied: tuple[str, ...],
    placed: Any,
    wanted: Any,
) -> tuple[Any, Any]:
    """The sums over micro-batches of what `gradient(weights, rows)` returns; of several in float32.

    A reduction over the mesh axes `copied` waits for the last micro-batch: along them devices have copies of the
    weights, and add up gradients of their own rows. (Between slices that is the step's one large transfer.) Over the
    other axes each micro-batch's gradients are reduced at once, to the shards that their weights have. Where a device
    wants a part of a sum alone, it gets no more of it: half of an all-reduce's bytes (Rajbhandari et al. 2020, section
    7.2.1).

    Args:
        gradient: of a micro-batch; the gradients of weights, and other sums over its rows: two trees.
        weights: what it takes beside the rows, whole along `copied`.
        rows: arrays [B, ...].
        micro_batches: their number, a divisor of B over the shards of the batch.
        layout: of the mesh.
        copied: mesh axes that shard the rows and no weight.
        placed: the sharding of each gradient's weight.
        wanted: the sharding that its sum is to have: that, or one dim cut by `copied` too.
    """

    def add_up(weights: Any, rows: Rows) -> tuple[Any, Any]:
        if micro_batches == 1:
            return gradient(weights, rows)

        def add_micro_batch(total: Any, micro: Rows) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(weights, micro)), None

        parts = {name: layout.split_rows(x, micro_batches, *[None] * (x.ndim - 1)) for name, x in rows.items()}
        shapes = jax.eval_shape(gradient, weights, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
        total, _ = jax.lax.scan(add_micro_batch, zeros, parts)
        return total

    if not copied:
        return add_up(weights, rows)

    def add_up_own(weights: Any, rows: Rows) -> tuple[Any, Any]:
        gradients, others = jax.tree.map(lambda x: x.astype(jnp.float32), add_up(weights, rows))
        return jax.tree.map(lambda x: x[None], gradients), jax.lax.psum(others, copied)

    whole, shared_out = PartitionSpec(), PartitionSpec(copied)
    own = layout.shard_map(add_up_own, in_specs=(whole, shared_out), out_specs=(shared_out, whole), over=copied)
    gradients, others = own(weights, rows)
    return jax.tree.map(lambda x, *at: _summed(x, *at, copied, layout), gradients, placed, wanted), others


def _summed(
    gradients: jax.Array, placed: NamedSharding, wanted: NamedSharding, copied: tuple[str, ...], layout: Layout
) -> jax.Array:
    """The sum of a weight's gradients [copies, ...] over its copies; the last four arguments are `accumulate`'s."""

    def of_shards(gradient_1: jax.Array) -> jax.Array:
        for dim, (before, after) in enumerate(zip(placed.spec, wanted.spec, strict=True)):
            if before != after:
                return jax.lax.psum_scatter(gradient_1[0], copied, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(gradient_1[0], copied)

    in_specs = PartitionSpec(copied, *placed.spec)
    return layout.shard_map(of_shards, in_specs=in_specs, out_specs=wanted.spec)(gradients)
