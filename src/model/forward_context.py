"""What every block of one forward pass is told, and the order of a row's tokens over the devices that share it."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from src.config.values import size_key
from src.errors import UserError
from src.parallel.mesh import Layout, mesh_axes_of


@dataclass(frozen=True)
class Context:
    """The rows' positions and segments, and how to compute: arrays and settings shared by all blocks."""

    positions_BT: jax.Array  # from 0 in each segment
    segment_ids_BT: jax.Array  # from 1 in each row; 0 is padding; tokens see their own segment only
    layout: Layout
    kernel: str  # of src/model/attention_kernels/choose.py
    packed: bool  # False: rows hold one segment, then padding, and a causal kernel needs no segments
    dropout_keys_BTW: jax.Array | None = None  # of each token (src/model/dropout.py); None: no dropout
    decoding: bool = False  # each row is one token, whose past is in the cache

    # Between blocks T may be shared by more devices than within, by those that share heads and hidden units. Both
    # placements are stated both ways: forward the gather of all projections, or the sum of all parts, is then one, and
    # so are backward the sum and the gather that answer them.

    def gathered(self, x_BTD: jax.Array) -> jax.Array:
        """What a block's projections read, placed as between blocks, to as within."""
        return self._placed(x_BTD, "norm_length", "length")

    def scattered(self, x_BTD: jax.Array) -> jax.Array:
        """What a block's last projection makes, placed as within blocks, to as between."""
        return self._placed(x_BTD, "length", "norm_length")

    def _placed(self, x_BTD: jax.Array, *axes: str) -> jax.Array:
        for axis in axes:
            x_BTD = self.layout.constrain(x_BTD, "batch", axis, "activation_embed")
        return x_BTD


def even_order(length: int, layout: Layout) -> np.ndarray:
    """The order in which devices that share rows of `length` tokens have even work: each place's index in the text.

    A token attends to all before it: of n devices with a part each, the last would work longest. So rows are cut into
    2n parts, and device i has parts i and 2n - 1 - i. Every array along T is in this order, but within generation.

    Raises:
        UserError: rows don't divide into so many parts.
    """
    n = layout.shards("length")
    if length % parts_of(n):
        keys = sharing_keys(layout, "length", "or")
        raise UserError(
            f"max_target_length={length} does not divide into {2 * n} parts, two for each device that shares a row "
            f"({layout.sharded_by('length')}): use a multiple of {2 * n}, or another {keys}"
        )
    if n == 1:
        return np.arange(length)
    parts = np.arange(length).reshape(2 * n, -1)
    return np.concatenate([parts[:n], parts[n:][::-1]], axis=1).reshape(-1)


def sharing_keys(layout: Layout, axis: str, conjunction: str) -> str:
    """The keys whose product is the number of devices that share a dim of this logical axis, in words."""
    keys = [size_key(kind, name) for name in layout.axes(axis) for kind in ("ici", "dcn")]
    return f"{', '.join(keys[:-1])} {conjunction} {keys[-1]}"


def parts_of(n: int) -> int:
    """Into how many parts rows are cut that n devices share."""
    return 2 * n if n > 1 else 1


def in_even_order(x_BT: jax.Array, layout: Layout) -> jax.Array:
    """An array [B, T, ...] of rows in the text's order, in that of `even_order`, with each device's part on it."""
    if layout.shards("length") == 1:
        return x_BT
    ordered_BT = x_BT[:, even_order(x_BT.shape[1], layout)]
    return layout.constrain(ordered_BT, "batch", "length", *[None] * (x_BT.ndim - 2))


def in_text_order(x_BT: jax.Array, n: int) -> jax.Array:
    """An array [B, T, ...] that is in the `even_order` of n devices, in the text's; whole along T on every device."""
    if n == 1:
        return x_BT
    # Slices of whole parts, which copy faster than a lookup of every place.
    parts = x_BT.reshape(x_BT.shape[0], n, 2, -1, *x_BT.shape[2:])
    return jnp.concatenate([parts[:, :, 0], parts[:, ::-1, 1]], axis=1).reshape(x_BT.shape)


def whole_rows(x_BT: jax.Array, layout: Layout, *axes: str | None) -> jax.Array:
    """An array [B, T, ...] in `even_order`, with whole rows in the text's order on each device: [B, n T, ...].

    `axes` are the logical axes of the further dims.

    The n devices that share a row have a copy each, beside each other. So what each of them makes of its copy is an
    array of its own too, and its gradient is summed where this function is, as it is shared out again.
    """
    sharing, n = layout.axes("length"), layout.shards("length")
    if n == 1:
        return x_BT
    placed = layout.spec(("batch", "length", *axes))
    # XLA for CPUs aborts on a sum in bfloat16, as of the gradient, that is made within a map over some of the axes.
    on_cpus = layout.mesh.devices.flat[0].platform == "cpu" and x_BT.dtype == jnp.bfloat16
    sent = jnp.float32 if on_cpus else x_BT.dtype

    # Over all axes that shard it, for XLA would gather it over the others too.
    @functools.partial(layout.shard_map, in_specs=placed, out_specs=placed, over=mesh_axes_of(placed))
    def gathered(x_BT: jax.Array) -> jax.Array:
        return in_text_order(jax.lax.all_gather(x_BT.astype(sent), sharing, axis=1, tiled=True), n).astype(x_BT.dtype)

    return gathered(x_BT)
