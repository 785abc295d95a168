"""Makes global arrays from hosts' rows; B is the number of a batch's rows over all hosts."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from src.data.types import Rows


def host_rows(sharding: jax.sharding.Sharding, global_shape: Sequence[int]) -> np.ndarray:
    """Lists the rows of a global array of which this process's devices hold a shard: int [rows], ascending."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map(tuple(global_shape)).values():
        if index:
            rows.update(range(*index[0].indices(global_shape[0])))
    return np.array(sorted(rows), np.int64)


def to_global(arrays: Any, shardings: Any, rows: Rows, global_batch: int) -> Any:
    """Assembles a pytree of global arrays [B, ...] on the devices of all hosts from this host's rows, [rows, ...].

    `rows` are the numbers of these rows in the global batch, ascending: at least `host_rows` of every sharding.
    """

    def of(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        def local(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(global_batch)
            start = int(np.searchsorted(rows, first))
            return array[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback((global_batch, *array.shape[1:]), sharding, local)

    return jax.tree.map(of, arrays, shardings)
