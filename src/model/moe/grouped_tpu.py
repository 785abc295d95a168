"""Grouped matmuls on TPUs: JAX's kernels (megablox), with tiles chosen for the groups.

Letters: R rows, G groups, X summed dim, Y output dim.
"""

import functools
import itertools
import math

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

MIN_ROWS = 128  # of a tile: what the TPU's matrix unit processes at once
MAX_ROWS = 512
OPERATIONS_PER_BYTE = 200  # computed by a TPU in the time of fetching a byte: 166 on v5p, 240 on v5e
ADDITION = 32  # multiplications in the time of adding a number to a sum in the core's memory
STEP = 2**25  # multiplications in the time of a step of a kernel's grid, a third of a microsecond
VMEM_BYTES = 12 * 2**20  # for a kernel's tiles, of the 16 MiB that the compiler grants


def rows_times_kernel(x_RX: Array, kernel: Array, rows_G: Array, interpret: bool, transposed: bool) -> Array:
    """Multiplies [R, X] by [G, X, Y], or [G, Y, X] with `transposed`, to [R, Y]; undefined past the last group."""
    (R, X), Y, rows = x_RX.shape, kernel.shape[1 if transposed else 2], row_tile(len(x_RX), len(rows_G))
    tiles = (rows, *tile_sizes(rows, X, Y, x_RX.dtype.itemsize))
    x_RX = padded(x_RX, 0, rows)
    return gmm(x_RX, kernel, rows_G, x_RX.dtype, tiles, transpose_rhs=transposed, interpret=interpret)[:R]


def rows_times_rows(x_RX: Array, y_RY: Array, rows_G: Array, interpret: bool) -> Array:
    """Multiplies each group's transposed [rows, X] by its [rows, Y], to [G, X, Y]."""
    rows = row_tile(len(x_RX), len(rows_G))
    tiles = (rows, *tile_sizes(rows, x_RX.shape[1], y_RY.shape[1], x_RX.dtype.itemsize))
    x_XR = padded(x_RX, 0, rows).swapaxes(0, 1)
    return tgmm(x_XR, padded(y_RY, 0, rows), rows_G, x_RX.dtype, tiles, interpret=interpret)


def padded(x: Array, dim: int, multiple: int) -> Array:
    """Pads a dim with zeros to a multiple."""
    return jnp.pad(x, [(0, -size % multiple if index == dim else 0) for index, size in enumerate(x.shape)])


def row_tile(rows: int, groups: int) -> int:
    """Rows per tile: a power of two from MIN_ROWS to MAX_ROWS, at most an eighth of the mean group's rows if possible.

    A tile that two groups share is computed for each, so borders cost at most an eighth if the mean group has at least
    8 x MIN_ROWS rows.
    """
    eighth = max(rows // groups // 8, 1)
    return min(max(1 << int(math.log2(eighth)), MIN_ROWS), MAX_ROWS)


@functools.cache
def tile_sizes(rows: int, X: int, Y: int, itemsize: int) -> tuple[int, ...]:
    """Chooses tiles of X and Y, multiples of 128 that fit in a TPU core's memory, with the least time per tile of rows.

    `rows` is the rows per tile. The time counts multiplying (including padding past the arrays' ends), adding to the
    sum, fetching both inputs, and grid steps. Its unit is one multiplication in the operands' dtype: int8 multiplies
    twice as fast, so everything else counts double.
    """
    speed, out_bytes = (2, 2) if itemsize == 1 else (1, itemsize)

    def time(tile: tuple[int, ...]) -> int:
        x, y = tile
        fetch = OPERATIONS_PER_BYTE * itemsize * (rows * x + x * y) // 2
        return -(-X // x) * -(-Y // y) * (rows * (x + speed * ADDITION) * y + speed * (fetch + STEP))

    def fits(tile: tuple[int, ...]) -> bool:
        x, y = tile
        # Inputs and outputs are double-buffered. The float32 sum is [rows, y], or [x, y] for a gradient: the larger.
        outputs = (rows if itemsize > 1 else max(rows, x)) * y
        return 2 * itemsize * (rows * x + x * y) + 2 * out_bytes * outputs + 4 * max(rows, x) * y <= VMEM_BYTES

    sizes = [range(128, min(-(-size // 128) * 128, 2048) + 1, 128) for size in (X, Y)]
    return min(filter(fits, itertools.product(*sizes)), key=time)
