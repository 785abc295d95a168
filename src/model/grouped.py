"""Products of rows with the weight of their group: experts whose tokens lie one after the other.

Letters: R rows, G groups, X summed over, Y made, M rows of a tile of the TPU kernel.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from src.model.weights import Adapted

LEAST_ROWS = 128  # of a tile: what the TPU's matrix unit takes at once
MOST_ROWS = 512
OPERATIONS_PER_BYTE = 200  # that a TPU makes while it fetches one: 166 on v5p, 240 on v5e
ADDITION = 32  # multiplications that take as long as adding a product to a sum in the memory of the core
STEP = 2**25  # multiplications that take as long as a step of a kernel's grid, a third of a microsecond
VMEM_BYTES = 12 * 2**20  # of a kernel's tiles, of the 16 MiB that the compiler grants


def grouped_matmul(
    x_RX: jax.Array, kernel: jax.Array | Adapted, rows_G: jax.Array, platform: str, interpret: bool = False
) -> jax.Array:
    """Rows of `x` times the weight of their group: [R, X] and [G, X, ...] to [R, ...].

    The first rows_G[0] rows are group 0's, the next rows_G[1] group 1's, and so on. Rows past the last group cost
    nothing where `platform` has a kernel for it, what comes out of them is undefined, and no gradient comes from them.

    On a TPU forward and both gradients are Pallas kernels (JAX's megablox), for the compiler makes the gradient to the
    weights a dense product over all groups. `interpret` runs them without a TPU, slowly, for tests.
    """
    if isinstance(kernel, Adapted):
        product = functools.partial(grouped_matmul, rows_G=rows_G, platform=platform, interpret=interpret)
        return product(x_RX, kernel.base) + product(product(x_RX, kernel.down), kernel.up)
    kernel_GXY = kernel.astype(x_RX.dtype).reshape(*kernel.shape[:2], -1)
    if platform == "tpu":
        out_RY = _tpu_product(x_RX, kernel_GXY, rows_G, interpret)
    else:
        out_RY = jax.lax.ragged_dot(x_RX, kernel_GXY, rows_G)
    return out_RY.reshape(-1, *kernel.shape[2:])


def batched_matmul(x_GRX: jax.Array, kernel: jax.Array | Adapted) -> jax.Array:
    """Each group's rows times its weight: [G, R, X] and [G, X, ...] to [G, R, ...]."""
    if isinstance(kernel, Adapted):
        return batched_matmul(x_GRX, kernel.base) + batched_matmul(batched_matmul(x_GRX, kernel.down), kernel.up)
    kernel_GXY = kernel.astype(x_GRX.dtype).reshape(*kernel.shape[:2], -1)
    return jnp.matmul(x_GRX, kernel_GXY).reshape(*x_GRX.shape[:2], *kernel.shape[2:])


def add_by_group(x: jax.Array, bias: jax.Array, factor_R1: jax.Array | None = None, *, rows_G: jax.Array) -> jax.Array:
    """Rows [R, ...] plus the bias [G, ...] of their group, times the row's factor; 0 past the last group."""
    group_R = jnp.searchsorted(jnp.cumsum(rows_G), jnp.arange(len(x)), side="right", method="compare_all")
    # A product, for the gradient of a table that is looked up would add to scattered rows.
    of_row_RG = jax.nn.one_hot(group_R, len(rows_G), dtype=x.dtype)
    of_row_RG = of_row_RG if factor_R1 is None else of_row_RG * factor_R1
    bias_RY = of_row_RG @ bias.reshape(len(bias), -1).astype(x.dtype)
    real_R = (group_R < len(rows_G)).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(real_R, x + bias_RY.reshape(x.shape), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tpu_product(x_RX: jax.Array, kernel_GXY: jax.Array, rows_G: jax.Array, interpret: bool) -> jax.Array:
    return _rows_times_kernel(x_RX, kernel_GXY, rows_G, interpret, transposed=False)


def _forward(x_RX: jax.Array, kernel_GXY: jax.Array, rows_G: jax.Array, interpret: bool) -> tuple[jax.Array, tuple]:
    return _tpu_product(x_RX, kernel_GXY, rows_G, interpret), (x_RX, kernel_GXY, rows_G)


def _backward(interpret: bool, kept: tuple, gradient_RY: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_RX, kernel_GXY, rows_G = kept
    to_x_RX = _rows_times_kernel(gradient_RY, kernel_GXY, rows_G, interpret, transposed=True)
    return to_x_RX, _rows_times_rows(x_RX, gradient_RY, rows_G, interpret), None


_tpu_product.defvjp(_forward, _backward)


def _rows_times_kernel(
    x_RX: jax.Array, kernel: jax.Array, rows_G: jax.Array, interpret: bool, transposed: bool
) -> jax.Array:
    """[R, X] times [G, X, Y], or where `transposed` [G, Y, X], to [R, Y]."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    R, X = x_RX.shape
    Y = kernel.shape[1 if transposed else 2]
    rows = row_tile(R, len(rows_G))
    tiles = (rows, *tile_sizes(rows, X, Y, x_RX.dtype.itemsize))
    x_RX = _whole_tiles(x_RX, rows)
    return gmm(x_RX, kernel, rows_G, x_RX.dtype, tiles, transpose_rhs=transposed, interpret=interpret)[:R]


def _rows_times_rows(x_RX: jax.Array, y_RY: jax.Array, rows_G: jax.Array, interpret: bool) -> jax.Array:
    """Each group's [rows, X] transposed times its [rows, Y], to [G, X, Y]."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows = row_tile(len(x_RX), len(rows_G))
    tiles = (rows, *tile_sizes(rows, x_RX.shape[1], y_RY.shape[1], x_RX.dtype.itemsize))
    x_XR = _whole_tiles(x_RX, rows).swapaxes(0, 1)
    return tgmm(x_XR, _whole_tiles(y_RY, rows), rows_G, x_RX.dtype, tiles, interpret=interpret)


def _whole_tiles(x_RX: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x_RX, ((0, -len(x_RX) % rows), (0, 0)))


def row_tile(rows: int, groups: int) -> int:
    """Rows of a tile: a power of two, at most an eighth of the mean group's.

    A tile with the border of two groups in it is computed for each, so that borders cost an eighth at most, where a
    mean group has 8 x LEAST_ROWS rows.
    """
    eighth = max(rows // groups // 8, 1)
    return min(max(1 << int(math.log2(eighth)), LEAST_ROWS), MOST_ROWS)


@functools.cache
def tile_sizes(rows: int, X: int, Y: int, itemsize: int) -> tuple[int, int]:
    """Tiles of X and Y, multiples of 128 that fit in a TPU core's memory, with the least time for one tile of rows.

    That is of multiplying, also past the arrays' ends, of adding to the sum, of fetching both inputs, and of a step.
    """

    def time(tile: tuple[int, int]) -> int:
        x, y = tile
        steps = -(-X // x) * -(-Y // y)
        fetched = itemsize * (rows * x + x * y)
        return steps * (rows * (x + ADDITION) * y + OPERATIONS_PER_BYTE * fetched // 2 + STEP)

    def fits(tile: tuple[int, int]) -> bool:
        x, y = tile
        # Inputs and output twice, for the next is fetched meanwhile; the larger sum, which is a gradient's, in float32.
        return 2 * itemsize * (rows * x + x * y + rows * y) + 4 * max(rows, x) * y <= VMEM_BYTES

    sizes = [range(128, min(-(-size // 128) * 128, 2048) + 1, 128) for size in (X, Y)]
    return min(filter(fits, itertools.product(*sizes)), key=time)
