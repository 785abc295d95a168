"""Computes the values that `log_internals` records in a step: norms by variable, and activations by layer."""

import jax
import jax.numpy as jnp

from src.model.params import STACKED, Tree, by_path, dotted


def norms(tree: Tree, axes: Tree) -> dict[str, jax.Array]:
    """Computes each array's norm by dotted name: [R] for R layers stacked by its logical `axes`, otherwise [1]."""
    axes_of = by_path(axes)

    def norm(axes: tuple[str | None, ...], x: jax.Array) -> jax.Array:
        stacked = int(bool(axes) and axes[0] in STACKED[:2])
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=range(stacked, x.ndim))).reshape(-1)

    return {dotted(path): norm(axes_of[path], x) for path, x in by_path(tree).items()}


def activation_rms(reports: Tree, tokens: jax.Array, width: int) -> jax.Array:
    """Root mean square [L] of each layer's output, from the sums of squares that blocks reported."""
    layers = []
    for blocks in reports["segments"].values():  # a group runs its pattern repeatedly
        sums = [jnp.sum(block["activations"], axis=(-2, -1)) for block in blocks.values()]
        layers.append(jnp.stack(sums, axis=1).reshape(-1))
    return jnp.sqrt(jnp.concatenate(layers) / (jnp.maximum(tokens, 1) * width))
