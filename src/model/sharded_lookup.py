"""Looks up rows of a table that is sharded over devices, each of which has the tokens of its own sequences."""

import jax
import numpy as np
from jax import Array

from src.model.rows import rows
from src.parallel.mesh import MeshLayout

OUTSIDE = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}  # rows of another device's shard: zeros


def look_up_sharded(table_VD: Array, ids_BT: Array, layout: MeshLayout, axis: str, blocks: int) -> Array:
    """Computes `look_up` with explicit collectives; if rows are sharded, sums the results over their shards.

    With several `blocks` of devices, each device gathers the columns of its block, looks them up for the tokens of one
    device of every block, and exchanges the results. With one, it gathers all columns.
    """
    sharing, gathered = layout.axes(axis), layout.axes("embed")
    # XLA partitions a plain lookup by rows in the same way. But within a map over other axes, XLA of JAX 0.11 aborts on
    # it, and if rows are not sharded, every device would look up the rows of all devices' tokens.
    devices = np.arange(layout.size(gathered)).reshape(blocks, -1)  # consecutive, in the order of D's shards
    near, far = (None if blocks == 1 else groups.tolist() for groups in (devices, devices.T))

    def on_device(part_VD: Array, ids_BT: Array) -> Array:
        if gathered:
            # The barrier also acts on the gradient, a reduce-scatter: without it, libtpu 0.0.42 and 0.0.48 fail with a
            # RET_CHECK if a loop over micro-batches casts and adds the reduce-scatter's result.
            part_VD = jax.lax.optimization_barrier(part_VD)
            part_VD = jax.lax.all_gather(part_VD, gathered, axis=1, axis_index_groups=near, tiled=True)
        ids_BT = ids_BT - (jax.lax.axis_index(sharing) * len(part_VD) if sharing else 0)
        if blocks == 1:
            return rows(part_VD, ids_BT, **OUTSIDE)[None]
        # C: devices with a block of columns each.
        ids_CBT = jax.lax.all_gather(ids_BT, gathered, axis_index_groups=far)
        return jax.lax.all_to_all(rows(part_VD, ids_CBT, **OUTSIDE), gathered, 0, 3, axis_index_groups=far, tiled=True)

    in_specs = layout.spec((axis, "embed")), layout.spec(("batch", "length"))
    mapped = layout.shard_map(on_device, in_specs, layout.spec((axis, "batch", "length", None)))
    return jax.lax.reduce_sum(mapped(table_VD, ids_BT), axes=(0,))
