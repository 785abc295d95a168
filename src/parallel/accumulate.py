"""Accumulates gradients over micro-batches on each device, and reduces them over devices once per step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from src.parallel.mesh import MeshLayout

Batch = dict[str, Array]  # arrays [B, ...], by name


@dataclass(frozen=True)
class Accumulation:
    """How a step's gradients are summed over micro-batches and devices."""

    layout: MeshLayout
    micro_batches: int  # the number of sequences per batch shard is a multiple of it
    replica_axes: tuple[str, ...]  # mesh axes along which devices hold the same weights
    pipelined: bool  # micro-batches run inside a pipeline's loop
    weights: Any  # sharding of each trainable weight
    updates: Any  # sharding of each gradient's sum: the weight's, maybe with replica axes added to a dim

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The replica axes over which gradients are reduced once, in a `shard_map`, instead of by the compiler."""
        # Without a loop the compiler reduces each gradient only once; in a loop it would do so in every iteration.
        return self.replica_axes if self.micro_batches > 1 or self.pipelined else ()


@jax.named_scope("accumulate")
def accumulate(
    gradient: Callable[[Any, Batch], tuple[Any, Any]], inputs: Any, rows: Batch, how: Accumulation
) -> tuple[Any, Any]:
    """Sums the results of `gradient(inputs, rows)` over micro-batches: gradients, and other sums.

    Sums are in float32 if there are several micro-batches or any `manual_axes`.

    A reduction over `manual_axes`, along which `inputs` are replicated, waits for the last micro-batch: between slices
    this is the step's only large transfer. Over other axes each micro-batch's gradients are reduced immediately, to the
    shards of their weights: by a reduce-scatter, which moves half of an all-reduce's bytes (Rajbhandari et al. 2020,
    7.2.1).
    """
    if not how.manual_axes:
        gradients, sums = _over_micro_batches(gradient, inputs, rows, how)
        if how.updates != how.weights:
            # Constrain to the weights' shardings first: otherwise XLA shards gradients inside their layers, after an
            # all-reduce of the complete gradients over all devices.
            gradients = jax.lax.with_sharding_constraint(gradients, how.weights)
            gradients = jax.lax.with_sharding_constraint(gradients, how.updates)
        return gradients, sums
    from src.parallel.replicas import sum_over_replicas

    compute = functools.partial(_over_micro_batches, gradient, how=how)
    return sum_over_replicas(compute, inputs, rows, how.layout, how.manual_axes, how.weights, how.updates)


def _over_micro_batches(gradient: Callable, inputs: Any, rows: Batch, how: Accumulation) -> tuple[Any, Any]:
    if how.micro_batches == 1:
        return gradient(inputs, rows)

    def add_micro_batch(total: Any, micro: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(inputs, micro)), None

    split = {name: how.layout.split_rows(x, how.micro_batches) for name, x in rows.items()}
    shapes = jax.eval_shape(gradient, inputs, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
    return jax.lax.scan(add_micro_batch, zeros, split)[0]
