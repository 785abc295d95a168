"""Which links of a TPU's torus a mesh axis uses, against JAX's own placement of meshes and against counted bytes."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from jax.experimental import mesh_utils

from src.config.schema import MESH_AXES
from src.extras.aot.hlo import collectives, dim_share
from src.extras.plan import traffic
from tests.aot.test_hlo import program

AXES = tuple(MESH_AXES)
TORUSES = {
    (16, 16): "TPU v5 lite",
    (4, 4): "TPU v6 lite",
    (4, 4, 4): "TPU v5",
    (4, 4, 8): "TPU v5",
    (2, 2, 4): "TPU v4",
}


@pytest.mark.parametrize(("torus", "kind"), TORUSES.items())
def test_links_are_those_of_the_mesh_that_jax_makes(torus, kind):
    generator = random.Random(3)
    chips = list(itertools.product(*map(range, (*torus, 1)[:3])))
    devices = [
        SimpleNamespace(id=number, platform="tpu", device_kind=kind, coords=list(coords), core_on_chip=0, slice_index=0)
        for number, coords in enumerate(sorted(chips, key=lambda coords: coords[::-1]))
    ]
    for _ in range(8):
        sizes = random_sizes(len(devices), generator)
        chosen = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        mesh = SimpleNamespace(devices=chosen, axis_names=AXES, size=len(devices))
        layout = SimpleNamespace(mesh=SimpleNamespace(axis_names=AXES), within=tuple(sizes))
        step = SimpleNamespace(layout=layout, torus=torus, devices_per_chip=1)
        large = [axis for axis, size in zip(AXES, sizes, strict=True) if size > 1]
        for axes in [*itertools.combinations(large, 1), *itertools.combinations(large, 2)]:
            dims = [AXES.index(axis) for axis in axes]
            numbers = np.moveaxis(np.arange(len(devices)).reshape(sizes), dims, range(-len(dims), 0))
            groups = numbers.reshape(-1, int(np.prod([sizes[dim] for dim in dims])))
            written = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
            gather = f"ROOT %g = f32[8]{{0}} all-gather(%p), replica_groups={{{written}}}"
            (found,) = collectives(program([gather]), mesh)
            assert traffic._links(step, axes) == pytest.approx(found.links), (sizes, axes)


def random_sizes(devices, generator):
    sizes = [1] * len(AXES)
    while np.prod(sizes) < devices:
        sizes[generator.randrange(len(sizes))] *= 2
    return sizes


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize(
    ("size", "count", "hops"), [(16, 16, 1), (16, 4, 1), (16, 4, 4), (16, 2, 8), (8, 4, 2), (8, 4, 1), (4, 4, 1)]
)
def test_a_group_has_the_bandwidth_that_its_busiest_link_leaves(size, count, hops, ring):
    """The bytes on the busiest link take the time, for each byte that a chip receives from others."""
    whole = busiest(size, size, 1, True) / (size - 1)
    part = busiest(size, count, hops, ring) / (count - 1) * count / size
    assert dim_share(count, (count - 1) * hops, size, ring) == pytest.approx(whole / part)


def test_a_line_has_the_same_bandwidth_as_a_whole_dim_and_as_a_part_of_a_ring():
    assert dim_share(4, 3, 4, False) == dim_share(4, 3, 16, True) == dim_share(2, 1, 2, False) == 0.5


def busiest(size, count, hops, ring):
    """Bytes over the busiest link while groups of `count` chips, `hops` apart, each gather one byte in all."""
    links = np.zeros((size, 2))
    for first in range(0, size, count * hops):
        for offset in range(hops):
            for source in range(count):
                closed = ring and count * hops == size
                # On a ring half of a shard goes either way around; on a line all of it goes to both ends.
                for way, reach in ((1, count - 1 - source), (-1, source)):
                    steps, part = ((count - 1) * hops, 0.5) if closed else (reach * hops, 1.0)
                    for hop in range(steps):
                        links[(first + offset + source * hops + way * hop) % size, int(way > 0)] += part / count
    return links.max()
