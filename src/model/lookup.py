"""Looks up embedding rows by token, or position rows by position, for any sharding of the table."""

import jax
from jax import Array

from src.model.rows import rows
from src.parallel.mesh import MeshLayout

LANES = 128  # elements of a row that a TPU moves at once


def look_up(table_VD: Array, ids_BT: Array, layout: MeshLayout, axis: str) -> Array:
    """Looks up rows [B, T, D] of a table, a weight whose dims have the logical axes `axis` and embed.

    If rows are sharded, each device looks up the rows in its shard, and a sum over devices combines them (Shoeybi et
    al. 2019, section 3). If D is sharded, a device either gathers the table, or looks up its columns for the tokens of
    other devices and exchanges the results; the exchange moves less if the table has many more rows than the device has
    tokens.
    """
    blocks = _column_blocks(table_VD, ids_BT, layout, axis)
    if blocks == 1 and not (layout.axes(axis) or jax.sharding.get_abstract_mesh().manual_axes):
        # Gathered over fsdp before the lookup, like every weight: otherwise XLA replicates the result.
        return rows(layout.constrain(table_VD, axis, None), ids_BT)
    from src.model.sharded_lookup import look_up_sharded

    return look_up_sharded(table_VD, ids_BT, layout, axis, blocks)


def _column_blocks(table_VD: Array, ids_BT: Array, layout: MeshLayout, axis: str) -> int:
    """Number of column blocks of a table if devices exchange looked-up columns; 1: gather the table instead."""
    (size, width), devices = table_VD.shape, layout.shards("embed")
    tokens = ids_BT.size // (layout.shards("batch") * layout.shards("length"))
    if 4 * tokens > size // layout.shards(axis):
        return 1
    # A TPU fetches at least LANES columns of a row, so narrower blocks would not be faster.
    return max(n for n in range(1, devices + 1) if devices % n == 0 and (n == 1 or width // n >= LANES))
