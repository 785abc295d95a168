"""Runs a group of repeated layers; alone knows about scanning, unrolling, rematerialisation and pipeline stages."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from src.model.forward_context import ForwardContext
from src.model.pipeline import Schedule, run_stages
from src.model.spec import LayerGroup

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
    """How layer groups run: nothing here changes a result."""

    scan_layers: bool = True
    remat_policy: str = "none"
    remat_custom: dict[str, str] = field(default_factory=dict)  # array -> device or offload
    schedule: Schedule | None = None  # of pipeline stages

    @property
    def kept(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the names of the arrays that a policy other than none keeps on the device, and in host memory."""
        if self.remat_policy != "custom":
            return POLICIES[self.remat_policy]
        places = self.remat_custom.items()
        return tuple(tuple(name for name, at in places if at == place) for place in ("device", "offload"))

    def remat(self, block: Callable, repeats: int) -> Callable:
        """Wraps a block of a pattern that runs `repeats` times, to keep for the backward pass what the policy names."""
        if self.remat_policy == "none":
            return block
        # A loop's body is compiled by itself, so common subexpressions cannot undo the recomputation there; a loop of
        # one round is none to XLA.
        return jax.checkpoint(block, policy=self._policy(), prevent_cse=not (self.scan_layers and repeats > 1))

    def remat_turn(self, run_turn: Callable) -> Callable:
        """Wraps a pipeline stage's turn, to keep what its blocks keep, but (unless remat_policy=none) no weights."""
        if self.remat_policy == "none":
            return run_turn
        return jax.checkpoint(run_turn, policy=self._policy("decoder_layer_input"), prevent_cse=False)

    def _policy(self, *more: str) -> Callable[..., Any]:
        """Returns JAX's policy that keeps what `remat_policy` names, and `more` on the device."""
        on_device, on_host = self.kept
        on_device = {*on_device, *more} - {*on_host}
        if on_host:
            return jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=sorted(on_device),
                names_which_can_be_offloaded=list(on_host),
                offload_src="device",
                offload_dst="pinned_host",
            )
        return jax.checkpoint_policies.save_only_these_names(*sorted(on_device))


def run_layer_group(
    group: LayerGroup,
    blocks: nnx.List,
    x: Array,
    context: ForwardContext,
    caches: Any,
    first_layer: int,
    execution: Execution,
    staged: bool,
) -> tuple[Array, Any, dict[int, Any]]:
    """Runs the group's pattern `repeats` times on [B, T, D], with blocks numbered from `first_layer`.

    Weights (unless shared), caches and the blocks' reports have a leading dim of `repeats`; caches are a list of one
    per pattern position, each None in training. With `staged`, pipeline stages, where there are any, split the repeats;
    with caches each runs all. Returns x, the caches, and the reports by pattern position.
    """
    graphdef, weights = nnx.split(blocks)
    layers = first_layer + len(group.pattern) * jnp.arange(group.repeats)

    def run_pattern(x: Array, repeat: Any, context: ForwardContext) -> tuple[Array, Any]:
        repeat_weights, caches, layer = repeat
        reports, new_caches = {}, []
        for position, block in enumerate(nnx.merge(graphdef, weights if group.shared else repeat_weights)):
            # Each block by itself: the backward pass then holds what one block computes again, not a whole pattern.
            run_block = execution.remat(functools.partial(block, context=context), group.repeats)
            x, cache, reports[position] = run_block(x, cache=caches[position], layer=layer + position)
            new_caches.append(cache)
        return x, (new_caches, reports)

    def run_repeats(x: Array, repeats: Any, context: ForwardContext) -> tuple[Array, Any]:
        """Runs consecutive repeats, given their weights, caches and first layers; returns x, caches and reports."""
        if execution.scan_layers:
            return jax.lax.scan(lambda x, repeat: run_pattern(x, repeat, context), x, repeats)
        outputs = []
        for index in range(len(repeats[-1])):
            x, output = run_pattern(x, jax.tree.map(lambda leaf, index=index: leaf[index], repeats), context)
            outputs.append(output)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    def run_chunk(x: Array, weights: Any, layers: Array, context: ForwardContext) -> tuple[Array, Any]:
        return run_repeats(x, (weights, caches, layers), context)

    if execution.schedule and staged and not jax.tree.leaves(caches):
        outputs = run_stages(run_chunk, x, weights, layers, context, execution.schedule, execution.remat_turn)
    else:
        outputs = run_chunk(x, None if group.shared else weights, layers, context)
    x, (caches, reports) = outputs
    return x, caches, reports
