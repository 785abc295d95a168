"""Runs a group of repeated layers: scanned, unrolled, or split over pipeline stages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from src.model.execution import Execution
from src.model.forward_context import ForwardContext, grad_barrier
from src.model.spec import LayerGroup


def run_layer_group(
    group: LayerGroup,
    blocks: Any,
    x: Array,
    context: ForwardContext,
    caches: Any,
    first_layer: int,
    execution: Execution,
    staged: bool,
) -> tuple[Array, Any, dict[int, Any]]:
    """Runs the group's pattern `repeats` times on [B, T, D], with blocks numbered from `first_layer`.

    Weights (unless shared), caches and the blocks' reports have a leading dim of `repeats`; caches are a list with one
    per pattern position, None without a cache. With `staged`, the repeats are split over pipeline stages, if any,
    unless there are caches. Returns x, the caches, and the reports by pattern position.
    """
    graphdef, weights = nnx.split(blocks)
    layers = first_layer + len(group.pattern) * jnp.arange(group.repeats)

    def run_pattern(x: Array, repeat: Any, context: ForwardContext) -> tuple[Array, Any]:
        repeat_weights, caches, layer = repeat
        reports, new_caches = {}, []
        for position, block in enumerate(nnx.merge(graphdef, weights if group.shared else repeat_weights)):
            if position and execution.has_experts:  # else a TPU would hold all blocks' expert gradients unsharded
                x, block = context.grad_barrier(x, block)
            # Remat each block separately: the backward pass then holds one block's recomputed arrays, not a whole
            # pattern's.
            run_block = execution.remat(functools.partial(block, context=context), group.repeats)
            x, cache, reports[position] = run_block(x, cache=caches[position], layer=layer + position)
            new_caches.append(cache)
        return x, (new_caches, reports)

    def run_chunk(x: Array, weights: Any, layers: Array, context: ForwardContext) -> tuple[Array, Any]:
        """Runs consecutive repeats, by their weights (None: shared) and first layers; returns x, (caches, reports)."""
        repeats = weights, caches, layers
        if execution.scan_layers:
            return jax.lax.scan(lambda x, repeat: run_pattern(x, repeat, context), x, repeats)
        outputs = []
        # Split, not indexed: a split's gradient is a concatenation, but XLA on GPUs would add the gradient of each
        # index to an array of zeros. Without the barrier it would concatenate in each kernel of the optimizer.
        if execution.for_gpu:
            repeats = *grad_barrier(weights), caches, layers
        split = jax.tree.map(lambda leaf: jax.lax.split(leaf, [1] * len(layers)), repeats)
        for repeat in jax.tree.transpose(jax.tree.structure(repeats), None, split):
            x, output = run_pattern(x, jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), repeat), context)
            outputs.append(output)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    if execution.schedule and staged and not jax.tree.leaves(caches):
        from src.model.pipeline import run_stages

        outputs = run_stages(run_chunk, x, weights, layers, context, execution.schedule, execution.remat_turn)
    else:
        outputs = run_chunk(x, None if group.shared else weights, layers, context)
    x, (new_caches, reports) = outputs
    return x, new_caches, reports
