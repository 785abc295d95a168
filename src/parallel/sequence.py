"""Sharded sequences (context parallelism): the order of their tokens, and gathering them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from src.config.schema import size_key
from src.parallel.mesh import MeshLayout, mesh_axes_of
from src.system.errors import Unsupported


def zigzag_order(length: int, layout: MeshLayout) -> np.ndarray:
    """Zigzag order for sequences of `length` tokens: the sequence index of the token at each position, int [length].

    A token attends to all earlier ones, so if n devices had consecutive parts, the last would have the most work.
    Sequences are cut into 2n parts instead, and device i has parts i and 2n - 1 - i. The model's arrays along T are in
    this order, except in generation. Raises Unsupported if n > 1 and the length is not divisible by 2n.
    """
    n = layout.shards("length")
    if length % zigzag_parts(n):
        raise Unsupported(
            f"max_target_length={length} does not divide into {2 * n} parts, two for each device that shares a "
            f"sequence ({layout.sharded_by('length')}): use a multiple of {2 * n}, or another "
            + sharing_keys(layout, "length")
        )
    if n == 1:
        return np.arange(length)
    parts = np.arange(length).reshape(2 * n, -1)
    return np.concatenate([parts[:n], parts[n:][::-1]], axis=1).reshape(-1)


def sharing_keys(layout: MeshLayout, axis: str) -> str:
    """Joins by "or" the keys whose values multiply to the number of shards, above 1, of a dim of this logical axis."""
    keys = [size_key(kind, name) for name in layout.axes(axis) for kind in ("ici", "dcn")]
    return f"{', '.join(keys[:-1])} or {keys[-1]}"


def zigzag_parts(n: int) -> int:
    """Number of parts into which the zigzag order cuts a sequence for n shards."""
    return 2 * n if n > 1 else 1


def to_zigzag(x_BT: Array, layout: MeshLayout) -> Array:
    """Reorders [B, T, ...] from sequence order to zigzag order, and shards it; raises as `zigzag_order` does."""
    if layout.shards("length") == 1:
        return x_BT
    ordered_BT = x_BT[:, zigzag_order(x_BT.shape[1], layout)]
    return layout.constrain(ordered_BT, "batch", "length", *[None] * (x_BT.ndim - 2))


def from_zigzag(x_BT: Array, n: int) -> Array:
    """Reorders [B, T, ...] from the zigzag order of n devices to sequence order; T must not be sharded."""
    if n == 1:
        return x_BT
    # Slicing whole parts copies faster than looking up every position.
    parts = x_BT.reshape(x_BT.shape[0], n, 2, -1, *x_BT.shape[2:])
    return jnp.concatenate([parts[:, :, 0], parts[:, ::-1, 1]], axis=1).reshape(x_BT.shape)


def replicate_rows(x_BT: Array, layout: MeshLayout, *axes: str | None) -> Array:
    """All-gathers [B, T, ...] from zigzag order into sequence order, one complete copy per device: [B, n T, ...].

    The n copies, for n shards of T, are concatenated along T, so that each device's shard is its own copy, which it may
    use differently. The gradient is summed over the copies and sharded again. `axes` are the logical axes of the dims
    after T.
    """
    sharing, n = layout.axes("length"), layout.shards("length")
    if n == 1:
        return x_BT
    sharded = layout.spec(("batch", "length", *axes))
    # XLA's CPU compiler aborts on a bfloat16 sum, here of gradients, within a map over some of the axes.
    sent = jnp.float32 if layout.platform == "cpu" and x_BT.dtype == jnp.bfloat16 else x_BT.dtype

    def gather(x_BT: Array) -> Array:
        return from_zigzag(jax.lax.all_gather(x_BT.astype(sent), sharing, axis=1, tiled=True), n).astype(x_BT.dtype)

    # Mapped over all axes that shard the array: otherwise XLA would gather it over the others too.
    return layout.shard_map(gather, sharded, sharded, over=mesh_axes_of(sharded))(x_BT)
