"""Looks up embedding rows by token, or position rows by position, for any sharding of the table."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from src.parallel.mesh import MeshLayout

LANES = 128  # numbers of a row that a TPU moves at once


def look_up(table_VD: Array, ids_BT: Array, layout: MeshLayout, axis: str) -> Array:
    """Looks up rows [B, T, D] of a table, a weight whose dims have the logical axes `axis` and embed.

    If rows are sharded, each device looks up the rows in its shard, and a sum over devices combines them (Shoeybi et
    al. 2019, section 3). If D is sharded, a device either gathers the table, or looks up its columns for the tokens of
    other devices and exchanges the results; the exchange moves less if the table has many more rows than the device has
    tokens.
    """
    sharing, gathered = layout.axes(axis), layout.axes("embed")
    blocks = _column_blocks(table_VD, ids_BT, layout, axis)
    if blocks == 1 and not (sharing or jax.sharding.get_abstract_mesh().manual_axes):
        # Gathered over fsdp before the lookup, like every weight: otherwise XLA replicates the result.
        return layout.constrain(table_VD, axis, None)[ids_BT]
    # XLA sums a plain lookup over `sharing` too; but within a map over other axes, XLA of JAX 0.11 aborts on it, and
    # with an unsharded table every device would look up the rows for all devices.
    devices = np.arange(layout.size(gathered)).reshape(blocks, -1)  # consecutive, as D is sharded
    near, far = (None if blocks == 1 else groups.tolist() for groups in (devices, devices.T))

    def on_device(part_VD: Array, ids_BT: Array) -> Array:
        if gathered:  # the gradient of a gather is a reduce-scatter
            # libtpu 0.0.42 and 0.0.48 fail with a RET_CHECK if a loop over micro-batches casts and adds its result.
            part_VD = jax.lax.optimization_barrier(part_VD)
            part_VD = jax.lax.all_gather(part_VD, gathered, axis=1, axis_index_groups=near, tiled=True)
        ids_BT = ids_BT - (jax.lax.axis_index(sharing) * len(part_VD) if sharing else 0)
        if blocks == 1:
            return _rows(part_VD, ids_BT)[None]
        # C: devices with a block of columns each. In float32, because the gradients of all their tokens are summed.
        ids_CBT = jax.lax.all_gather(ids_BT, gathered, axis_index_groups=far)
        rows_CBTD = _rows(part_VD.astype(jnp.float32), ids_CBT).astype(part_VD.dtype)
        return jax.lax.all_to_all(rows_CBTD, gathered, 0, 3, axis_index_groups=far, tiled=True)

    in_specs = layout.spec((axis, "embed")), layout.spec(("batch", "length"))
    mapped = layout.shard_map(on_device, in_specs, layout.spec((axis, "batch", "length", None)))
    return jax.lax.reduce_sum(mapped(table_VD, ids_BT), axes=(0,))


def _column_blocks(table_VD: Array, ids_BT: Array, layout: MeshLayout, axis: str) -> int:
    """Number of column blocks of a table if devices exchange looked-up columns; 1: gather the table instead."""
    (rows, width), devices = table_VD.shape, layout.shards("embed")
    tokens = ids_BT.size // (layout.shards("batch") * layout.shards("length"))
    if 4 * tokens > rows // layout.shards(axis):
        return 1
    # A block has at least as many columns as a TPU fetches of a row in any case.
    return max(n for n in range(1, devices + 1) if devices % n == 0 and (n == 1 or width // n >= LANES))


def _rows(table_VD: Array, ids: Array) -> Array:
    """Gathers rows by index, with zeros for indices outside the table."""
    return table_VD.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
