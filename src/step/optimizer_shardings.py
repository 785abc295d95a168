"""Shards each array of an optimizer's state like the weight that it updates."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from src.model.params import by_path


def state_shardings(opt: Any, shapes: Any, shardings: Any, copy: NamedSharding) -> Any:
    """Sharding of each array of an optimizer's state, of shapes `opt`; `copy` for arrays that belong to no weight.

    An array belongs to the weight whose path its own path contains. `shapes` and `shardings` describe the weights'
    updates.
    """
    sizes, placed = by_path(shapes), by_path(shardings)

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = tuple(entry.key for entry in path if isinstance(entry, DictKey))
        ends = [(start, end) for start in range(len(keys)) for end in range(len(keys), start, -1)]
        weight = next((keys[start:end] for start, end in ends if keys[start:end] in placed), None)
        if weight is None:
            return copy
        dims = _dims_of(leaf.shape, sizes[weight].shape)
        at = placed[weight]
        return at.update(spec=PartitionSpec(*(None if dim is None else at.spec[dim] for dim in dims)))

    return jax.tree.map_with_path(place, opt)


def _dims_of(shape: Sequence[int], weight: Sequence[int]) -> list[int | None]:
    """Maps each dim of an array to a dim of its weight; None if there is none, so the dim is not sharded.

    An array of the weight's rank has the weight's dims, or their means (size 1); for another rank, dims are matched by
    size, in order: Shampoo's [L, D, D] for a weight [L, D, F] has its L, the first D, and no third.
    """
    if len(shape) == len(weight):
        return [dim if size == weight[dim] else None for dim, size in enumerate(shape)]
    dims: list[int | None] = []
    first = 0
    for size in shape:
        dim = next((dim for dim in range(first, len(weight)) if weight[dim] == size), None)
        dims.append(dim)
        first = first if dim is None else dim + 1
    return dims
