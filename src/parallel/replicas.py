"""Sums gradients over the devices that hold the same weights, and shards the optimizer's state over them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from src.parallel.mesh import MeshLayout, axes_of_dim


def add_mesh_axes(sharding: NamedSharding, shape: Sequence[int], axes: Sequence[str]) -> NamedSharding:
    """Adds `axes` to the sharding of one dim of an array of this shape; returns `sharding` if no dim is divisible."""
    parts = list(map(axes_of_dim, sharding.spec))
    # Prefer an unsharded dim, usually the layer dim.
    for dim in sorted(range(len(shape)), key=lambda dim: bool(parts[dim])):
        cut_by = (*parts[dim], *axes)
        if shape[dim] % math.prod(sharding.mesh.shape[name] for name in cut_by) == 0:
            parts[dim] = cut_by
            break
    return sharding.update(spec=PartitionSpec(*(part or None for part in parts)))


def sum_over_replicas(
    compute: Callable[[Any, Any], tuple[Any, Any]],
    inputs: Any,
    rows: Any,
    layout: MeshLayout,
    axes: tuple[str, ...],
    weights: Any,
    updates: Any,
) -> tuple[Any, Any]:
    """Sums the results of `compute(inputs, rows)` over the mesh axes `axes`: gradients, and other sums, in float32.

    `inputs` are the same on all replicas, and `rows`, arrays [B, ...], are split over them. `weights` has the sharding
    of each weight and `updates` the sharding of its gradient's sum, maybe also over the replicas.
    """

    def on_replica(inputs: Any, rows: Any) -> tuple[Any, Any]:
        gradients, sums = jax.tree.map(lambda x: x.astype(jnp.float32), compute(inputs, rows))
        return jax.tree.map(lambda x: x[None], gradients), jax.lax.psum(sums, axes)

    def reduce(gradients: Array, weight: NamedSharding, update: NamedSharding) -> Array:
        """Sums a weight's gradients [replicas, ...] over its replicas, to the shards of its update."""

        def of_shards(gradient_1: Array) -> Array:
            for dim, (before, after) in enumerate(zip(weight.spec, update.spec, strict=True)):
                if before != after:
                    return jax.lax.psum_scatter(gradient_1[0], axes, scatter_dimension=dim, tiled=True)
            return jax.lax.psum(gradient_1[0], axes)

        in_specs = PartitionSpec(axes, *weight.spec)
        return layout.shard_map(of_shards, in_specs=in_specs, out_specs=update.spec)(gradients)

    whole, by_replica = PartitionSpec(), PartitionSpec(axes)
    mapped = layout.shard_map(on_replica, (whole, by_replica), (by_replica, whole), over=axes)
    gradients, sums = mapped(inputs, rows)
    return jax.tree.map(reduce, gradients, weights, updates), sums
