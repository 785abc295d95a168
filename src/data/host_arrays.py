"""Makes global arrays from hosts' rows, and compares values of processes; B counts a batch's rows over all hosts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from src.data.types import Rows
from src.system.errors import UserError, changed_keys


def host_rows(sharding: jax.sharding.Sharding, global_shape: Sequence[int]) -> np.ndarray:
    """Lists the rows of a global array of which this process's devices hold a shard: int [rows], ascending."""
    index_maps = sharding.addressable_devices_indices_map(tuple(global_shape)).values()
    return np.unique(np.concatenate([np.arange(*index[0].indices(global_shape[0])) for index in index_maps if index]))


def to_global(arrays: Any, shardings: Any, rows: Rows, global_batch: int) -> Any:
    """Assembles global arrays [B, ...] on the devices of all hosts from this host's rows, [rows, ...], in any pytree.

    `rows` are the numbers of these rows in the global batch, ascending: at least `host_rows` of every sharding.
    """

    def of(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        def local(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(global_batch)
            start = int(np.searchsorted(rows, first))
            return array[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback((global_batch, *array.shape[1:]), sharding, local)

    return jax.tree.map(of, arrays, shardings)


def max_over_hosts(value: np.ndarray) -> np.ndarray:
    """Takes the elementwise maximum over all processes."""
    if jax.process_count() == 1:
        return value
    return np.max(multihost_utils.process_allgather(value), axis=0)


def gather_json(value: Any) -> list[Any]:
    """Gathers a value from each process, in process order; values have to be JSON serializable."""
    content = json.dumps(value, sort_keys=True).encode()
    longest = int(max_over_hosts(np.array(len(content))))
    contents = np.atleast_2d(multihost_utils.process_allgather(np.frombuffer(content.ljust(longest), np.uint8)))
    return [json.loads(each.tobytes()) for each in contents]


def check_same(facts: Mapping[str, str | int], what: str, needed: str) -> None:
    """Raises UserError on every process, showing both sides, if `facts` about `what` differ between processes."""
    everyones = gather_json(facts)
    if differing := [process for process, each in enumerate(everyones) if each != everyones[0]]:
        first, other = everyones[0], everyones[differing[0]]
        listed = "\n".join(
            f"  {name}: {first.get(name)} in process 0, {other.get(name)} in process {differing[0]}"
            for name in changed_keys(first, other)
        )
        processes = ", ".join(map(str, differing))
        raise UserError(
            f"process {processes} reads different {what} from process 0: give all hosts {needed}.\n{listed}"
        )
