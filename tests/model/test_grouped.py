"""Products by group against a loop over groups: the plain ones, and the TPU's kernels, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close

from src.model.grouped import add_by_group, grouped_matmul, row_tile, tile_sizes
from src.model.weights import Adapted

ROWS = 300
# Rows of each of five groups; what is left of 300 is no group's.
SIZES = {"all": [100, 28, 72, 1, 99], "empty groups": [0, 130, 0, 20, 0], "none": [0, 0, 0, 0, 0]}


def by_loop(x, kernel, sizes):
    out, start = np.zeros((ROWS, *kernel.shape[2:])), 0
    for weight, size in zip(kernel, sizes, strict=True):
        out[start : start + size] = np.einsum("rx,x...->r...", x[start : start + size], weight)
        start += size
    return out


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_each_group_has_its_weight(platform, sizes):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(ROWS, 40)).astype(np.float32), rng.normal(size=(5, 40, 2, 24)).astype(np.float32)
    gradient = rng.normal(size=(ROWS, 2, 24)).astype(np.float32)
    real = np.arange(ROWS)[:, None] < sum(sizes)
    gradient[sum(sizes) :] = np.nan  # undefined, and nothing comes of it

    def product(x, kernel):
        return grouped_matmul(x, kernel, jnp.array(sizes, jnp.int32), platform, interpret=True)

    if platform == "cpu":
        gradient = np.nan_to_num(gradient)
    out, to_inputs = jax.vjp(jax.jit(product), x, kernel)
    to_x, to_kernel = to_inputs(jnp.asarray(gradient))
    expected = by_loop(x, kernel, sizes)
    assert_close(np.where(real[..., None], out, 0), expected + 0.0, 1e-5) if any(sizes) else None
    starts = np.cumsum([0, *sizes])
    parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    expected_kernel = np.stack([np.einsum("rx,raf->xaf", x[part], gradient[part]) for part in parts])
    np.testing.assert_allclose(to_kernel, expected_kernel, atol=1e-3)
    for part, weight in zip(parts, kernel, strict=True):
        np.testing.assert_allclose(to_x[part], np.einsum("raf,xaf->rx", gradient[part], weight), atol=1e-3)
