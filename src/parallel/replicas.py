"""Devices that hold the same weights, and arrays that they share out further."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from src.parallel.mesh import Layout, axes_of_dim, mesh_axes_of


def replica_axes(layout: Layout, shardings: Any) -> tuple[str, ...]:
    """Returns the mesh axes that shard the batch but no parameter: devices along them hold the same weights."""
    used = {name for at in jax.tree.leaves(shardings) for name in mesh_axes_of(at.spec)}
    return tuple(name for name in layout.axes("batch") if name not in used)


def add_mesh_axes(sharding: NamedSharding, shape: Sequence[int], axes: Sequence[str]) -> NamedSharding:
    """`sharding` of an array of this shape, with one dim cut by the mesh axes `axes` too; as it is where none divides.

    The first dim that nothing cuts yet comes first, which is mostly that of layers.
    """
    parts = list(map(axes_of_dim, sharding.spec))
    for dim in sorted(range(len(shape)), key=lambda dim: bool(parts[dim])):
        cut_by = (*parts[dim], *axes)
        if shape[dim] % math.prod(sharding.mesh.shape[name] for name in cut_by) == 0:
            parts[dim] = cut_by
            break
    return sharding.update(spec=PartitionSpec(*(part or None for part in parts)))
