"""Products by group against a loop over groups: the plain ones, and the TPU's and GPU's kernels, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.model.moe.grouped_matmul import grouped_matmul
from src.model.moe.grouped_tpu import MIN_ROWS, row_tile, tile_sizes

ROWS = 300
# Rows of each of five groups; what is left of 300 is no group's.
SIZES = {"all": [100, 28, 72, 1, 99], "empty groups": [0, 130, 0, 20, 0], "none": [0, 0, 0, 0, 0]}


@functools.cache
def with_gradients(platform, transposed):
    """x, weights, a gradient and groups' sizes -> the product and its gradients, compiled for any sizes."""

    @jax.jit
    def run(x, kernel, gradient, sizes_G):
        def product(x, kernel):
            kernel = kernel.swapaxes(1, 2) if transposed else kernel
            return grouped_matmul(x, kernel, sizes_G, platform, transposed, interpret=True)

        out, to_inputs = jax.vjp(product, x, kernel)
        return out, *to_inputs(gradient)

    return run


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize(("dtype", "transposed"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_each_group_has_its_weight(dtype, transposed, platform, sizes):
    rng = np.random.default_rng(0)
    shapes = (ROWS, 40), (5, 40, 72), (ROWS, 72)
    x, kernel, gradient = (np.array(rng.normal(size=shape), jnp.dtype(dtype)) for shape in shapes)
    if platform != "cpu":
        x[sum(sizes) :] = gradient[sum(sizes) :] = np.nan  # undefined past the last group, and nothing comes of it

    out, to_x, to_kernel = with_gradients(platform, transposed)(x, kernel, gradient, np.array(sizes, np.int32))
    x, kernel, gradient = (each.astype(np.float64) for each in (x, kernel, gradient))

    def assert_product(found, einsum, *factors):
        """Summed in float32, and rounded to the dtype once."""
        assert found.dtype == dtype
        expected, size = np.einsum(einsum, *factors), np.einsum(einsum, *map(np.abs, factors))
        error = np.abs(np.asarray(found, np.float64) - expected)
        assert np.all(error <= jnp.finfo(dtype).eps * np.abs(expected) + 1e-6 * size)

    for group, start in enumerate(np.cumsum([0, *sizes[:-1]])):
        part = slice(start, start + sizes[group])
        assert_product(out[part], "rx,xy->ry", x[part], kernel[group])
        assert_product(to_x[part], "ry,xy->rx", gradient[part], kernel[group])
        assert_product(to_kernel[group], "rx,ry->xy", x[part], gradient[part])


@pytest.mark.parametrize(("rows", "groups"), [(8192, 2), (40960, 16), (16384, 1), (65536, 8)])
def test_borders_of_groups_cost_an_eighth_at_most(rows, groups):
    tile = row_tile(rows, groups)
    assert groups * tile <= rows / 8
    assert rows % tile == 0


def test_small_groups_have_the_least_tile_and_tiles_waste_a_tenth_at_most():
    assert row_tile(100, 50) == MIN_ROWS
    for size in (1408, 2048, 2880, 4096, 5760, 7168, 14336):
        for tile in tile_sizes(256, size, 4096, 2), tile_sizes(256, 4096, size, 2)[::-1]:
            assert -(-size // tile[0]) * tile[0] < 1.1 * size
