"""From a host's rows to the global arrays on all devices, and back.

B: rows of a batch, over all hosts.
"""

import functools
import json
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from src.data.packing import Batch
from src.errors import UserError


def host_rows(sharding: jax.sharding.Sharding, global_shape: Sequence[int]) -> np.ndarray:
    """int [rows], ascending: the rows (dim 0) of a global array that this process's devices hold any part of."""
    index_maps = sharding.addressable_devices_indices_map(tuple(global_shape)).values()
    return np.unique(np.concatenate([np.arange(*index[0].indices(global_shape[0])) for index in index_maps]))


def to_global(
    batch: Batch, shardings: Mapping[str, jax.sharding.Sharding], rows: Sequence[int], global_batch: int
) -> dict[str, jax.Array]:
    """Global arrays [B, ...] on the devices of all hosts.

    Args:
        batch: this host's rows, [rows, ...].
        shardings: of each array of the batch; its other dims may be sharded too.
        rows: which rows of the global batch `batch` has, ascending: at least `host_rows` of every sharding.
        global_batch: B.
    """

    def part(array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        return array[(_local(index[0], rows, global_batch), *index[1:])]

    return {
        name: jax.make_array_from_callback(
            (global_batch, *array.shape[1:]), shardings[name], functools.partial(part, array)
        )
        for name, array in batch.items()
    }


def to_host(array: jax.Array, rows: Sequence[int]) -> np.ndarray:
    """The rows of a global array as `to_global` took them: a restored `data_position`, for `train_batches`.

    Args:
        array: [B, ...].
        rows: `host_rows` of its sharding.
    """
    host = np.empty((len(rows), *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        host[(_local(shard.index[0], rows, len(array)), *shard.index[1:])] = shard.data
    return host


def _local(global_rows: slice, rows: Sequence[int], global_batch: int) -> slice:
    """Where a range of global rows lies among this host's `rows`, which have all of it."""
    first, last, _ = global_rows.indices(global_batch)
    start = int(np.searchsorted(rows, first))
    return slice(start, start + last - first)


def max_over_hosts(value: np.ndarray) -> np.ndarray:
    """The greatest value of all processes, element by element."""
    if jax.process_count() == 1:
        return value
    return np.max(multihost_utils.process_allgather(value), axis=0)


def check_same_data(fingerprint: Mapping[str, str | int]) -> None:
    """Raises UserError on every process, each with both sides, if one of them reads other data than process 0."""
    content = json.dumps(fingerprint, sort_keys=True).encode()
    longest = int(max_over_hosts(np.array(len(content))))
    contents = np.atleast_2d(multihost_utils.process_allgather(np.frombuffer(content.ljust(longest), np.uint8)))
    others = np.flatnonzero((contents != contents[0]).any(axis=1)).tolist()
    if others:
        first, other = (json.loads(contents[process].tobytes()) for process in (0, others[0]))
        differences = "\n".join(
            f"  {name}: {first.get(name)} in process 0, {other.get(name)} in process {others[0]}"
            for name in {**first, **other}
            if first.get(name) != other.get(name)
        )
        raise UserError(
            f"the data of process {', '.join(map(str, others))} are not those of process 0: give all hosts the same "
            f"files, tokenizer and keys.\n{differences}"
        )
