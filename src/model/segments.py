"""Runs a segment: the one place that knows scanning, unrolling and rematerialisation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from src.model.context import Context
from src.model.spec import Segment

QKV = ("query_proj", "key_proj", "value_proj")
PRODUCTS = (*QKV, "out_proj", "mlpwi", "mlpwo")

# remat_policy -> (arrays kept on the device, arrays kept in host memory); base.yml describes them.
POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "minimal": (PRODUCTS, ()),
    "minimal_with_context": ((*PRODUCTS, "context"), ()),
    "save_qkv_proj": (QKV, ()),
    "save_out_proj": (("out_proj",), ()),
    "qkv_proj_offloaded": ((), QKV),
    "minimal_offloaded": ((), PRODUCTS),
}


@dataclass(frozen=True)
class Execution:
    """How segments run: nothing here changes a result."""

    scan_layers: bool = True
    remat_policy: str = "none"
    remat_custom: dict[str, str] = field(default_factory=dict)  # array -> device or offload

    def remat(self, block: Callable, repeats: int) -> Callable:
        """`block`, one of a pattern run `repeats` times, keeping for the backward pass what the policy names."""
        if self.remat_policy == "none":
            return block
        if self.remat_policy == "custom":
            on_device = tuple(name for name, where in self.remat_custom.items() if where == "device")
            on_host = tuple(name for name, where in self.remat_custom.items() if where == "offload")
        else:
            on_device, on_host = POLICIES[self.remat_policy]
        if on_host:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(on_device),
                names_which_can_be_offloaded=list(on_host),
                offload_src="device",
                offload_dst="pinned_host",
            )
        else:
            policy = jax.checkpoint_policies.save_only_these_names(*on_device)
        # A loop's body is compiled by itself, so common subexpressions cannot undo the recomputation there; one round
        # is no loop to XLA.
        return jax.checkpoint(block, policy=policy, prevent_cse=not (self.scan_layers and repeats > 1))


def run_segment(
    segment: Segment,
    blocks: nnx.List,
    x: jax.Array,
    context: Context,
    caches: Any,
    first_layer: int,
    execution: Execution,
) -> tuple[jax.Array, Any, dict[int, Any]]:
    """Runs the segment's pattern `repeats` times.

    Args:
        segment: the plan.
        blocks: the pattern's blocks; their weights have a leading dim of `repeats`, unless they are shared.
        x: [B, T, D].
        context: what every block is told.
        caches: a list of one cache a pattern position, each with a leading dim of `repeats`; None in training.
        first_layer: the model's number of the segment's first layer.
        execution: scanned or unrolled, and what is kept for the backward pass.

    Returns:
        x, the caches, and the blocks' reports by pattern position, with a leading dim of `repeats`.
    """
    graphdef, weights = nnx.split(blocks)
    period = len(segment.pattern)

    def run_pattern(x: jax.Array, weights: Any, caches: Any, layer: jax.Array) -> tuple[jax.Array, Any, Any]:
        reports, new_caches = {}, []
        for position, block in enumerate(nnx.merge(graphdef, weights)):
            cache = None if caches is None else caches[position]
            # Each block by itself: the backward pass then holds what one block computes again, not a whole pattern.
            run_block = execution.remat(functools.partial(block, context=context), segment.repeats)
            x, cache, report = run_block(x, cache=cache, layer=layer + position)
            new_caches.append(cache)
            reports[position] = report
        return x, (None if caches is None else new_caches), reports

    def step(x: jax.Array, repeat: Any) -> tuple[jax.Array, Any]:
        own_weights, caches, layer = repeat
        x, caches, reports = run_pattern(x, weights if segment.shared else own_weights, caches, layer)
        return x, (caches, reports)

    layers = first_layer + period * jnp.arange(segment.repeats)
    repeats = (None if segment.shared else weights, caches, layers)
    if execution.scan_layers:
        x, (caches, reports) = jax.lax.scan(step, x, repeats)
        return x, caches, reports
    outputs = []
    for index in range(segment.repeats):
        x, output = step(x, jax.tree.map(lambda leaf, index=index: leaf[index], repeats))
        outputs.append(output)
    caches, reports = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
    return x, caches, reports
