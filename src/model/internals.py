"""Computes the norms and root mean squares that `log_internals` reports, layer by layer."""

import jax
import jax.numpy as jnp

from src.model.params import STACKED, Tree, by_path, dotted


def norms(tree: Tree, axes: Tree) -> dict[str, jax.Array]:
    """Norms of weights, gradients or updates by dotted name: [R] for R stacked layers, or [1]."""
    found, axes_of = {}, by_path(axes)
    for path, x in by_path(tree).items():
        stacked = len({*axes_of[path][:1]}.intersection(STACKED[:2]))  # 1 if the first dim of x stacks layers, else 0
        squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=range(stacked, x.ndim))
        found[dotted(path)] = jnp.sqrt(squares).reshape(-1)
    return found


def sum_of_squares(x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Sums the squares of a block's output over the tokens that are not padding, for `activation_rms`."""
    squares_BT = jnp.sum(jnp.square(jax.lax.stop_gradient(x_BTD).astype(jnp.float32)), axis=-1)
    return jnp.sum(squares_BT * (segment_ids_BT > 0))


def activation_rms(reports: Tree, tokens: jax.Array, width: int) -> jax.Array:
    """Root mean square [L] of each layer's output, from the sums of squares that blocks reported."""
    layers = []
    for blocks in reports["segments"].values():
        sums = [jnp.sum(block["activations"], axis=(-2, -1)) for block in blocks.values()]
        layers.append(jnp.stack(sums, axis=1).reshape(-1))  # in layer order: a group runs its pattern repeatedly
    return jnp.sqrt(jnp.concatenate(layers) / (jnp.maximum(tokens, 1) * width))
