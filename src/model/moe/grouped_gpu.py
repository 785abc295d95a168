"""Grouped matmuls on NVIDIA GPUs: two Pallas kernels compiled by Triton; each tile of rows belongs to one group.

Letters: R rows, G groups, X summed dim, Y output dim, V tiles of rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

TILE = 128  # rows and columns of the output that one program computes
SUMMED_BYTES = 128  # bytes along the summed dim per step of a program's loop
Part = tuple[Any, Array]  # indices along a dim, and which of them are in bounds
PARAMETERS = triton.CompilerParams(num_warps=8, num_stages=4)


def rows_times_kernel(x_RX: Array, kernel: Array, rows_G: Array, interpret: bool, transposed: bool) -> Array:
    """Multiplies [R, X] by [G, X, Y], or [G, Y, X] with `transposed`, to [R, Y]; undefined past the last group.

    Each group's rows are cut into tiles separately: R / TILE tiles, plus at most one per group.
    """
    (R, X), Y = x_RX.shape, kernel.shape[1 if transposed else 2]
    step = SUMMED_BYTES // x_RX.dtype.itemsize
    end_G, tiles_G = jnp.cumsum(rows_G), -(-rows_G // TILE)
    end_tile_G = jnp.cumsum(tiles_G)
    tile_V = jnp.arange(R // TILE + len(rows_G))
    group_V = jnp.searchsorted(end_tile_G, tile_V, side="right", method="compare_all")
    used_V = group_V < len(rows_G)
    group_V = jnp.where(used_V, group_V, 0)
    end_V = jnp.where(used_V, end_G[group_V], 0)
    first_V = (end_G - rows_G)[group_V] + TILE * (tile_V - (end_tile_G - tiles_G)[group_V])

    def program(group_ref: Any, first_ref: Any, end_ref: Any, x_ref: Any, kernel_ref: Any, out_ref: Any) -> None:
        tile, column = pl.program_id(1), pl.program_id(0) * TILE
        group, first, end = group_ref[tile], first_ref[tile], end_ref[tile]

        @pl.when(first < end)
        def _() -> None:
            rows, columns = _part(first, TILE, end), _part(column, TILE, Y)

            def add(index: Array, sum_RY: Array) -> Array:
                summed = _part(index * step, step, X)
                kernel_part = (columns, summed) if transposed else (summed, columns)
                x_RX, kernel_XY = _load(x_ref, rows, summed), _load(kernel_ref, *kernel_part, group)
                return sum_RY + triton.dot(x_RX, kernel_XY, trans_b=transposed)

            sum_RY = jax.lax.fori_loop(0, pl.cdiv(X, step), add, jnp.zeros((TILE, TILE), jnp.float32))
            _store(out_ref, sum_RY, rows, columns)

    # Programs of the same tile of rows run consecutively and share its rows in the cache.
    grid = (pl.cdiv(Y, TILE), len(tile_V))
    return _run(program, grid, (R, Y), interpret, group_V, first_V, end_V, x_RX, kernel)


def rows_times_rows(x_RX: Array, y_RY: Array, rows_G: Array, interpret: bool) -> Array:
    """Multiplies each group's transposed [rows, X] by its [rows, Y], to [G, X, Y]."""
    (_, X), Y, G = x_RX.shape, y_RY.shape[1], len(rows_G)
    step = SUMMED_BYTES // x_RX.dtype.itemsize
    end_G = jnp.cumsum(rows_G)

    def program(first_ref: Any, end_ref: Any, x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        group = pl.program_id(2)
        first, end = first_ref[group], end_ref[group]
        x_columns, y_columns = _part(pl.program_id(1) * TILE, TILE, X), _part(pl.program_id(0) * TILE, TILE, Y)

        def add(index: Array, sum_XY: Array) -> Array:
            rows = _part(first + index * step, step, end)
            return sum_XY + triton.dot(_load(x_ref, rows, x_columns), _load(y_ref, rows, y_columns), trans_a=True)

        sum_XY = jax.lax.fori_loop(0, pl.cdiv(end - first, step), add, jnp.zeros((TILE, TILE), jnp.float32))
        _store(out_ref, sum_XY, x_columns, y_columns, group)

    grid = (pl.cdiv(Y, TILE), pl.cdiv(X, TILE), G)
    return _run(program, grid, (G, X, Y), interpret, end_G - rows_G, end_G, x_RX, y_RY)


def _run(program: Callable, grid: tuple[int, ...], shape: tuple[int, ...], interpret: bool, *inputs: Array) -> Array:
    out = jax.ShapeDtypeStruct(shape, inputs[-2].dtype)
    return pl.pallas_call(program, out, grid=grid, compiler_params=PARAMETERS, interpret=interpret)(*inputs)


def _part(first: Array, size: int, end: Array | int) -> Part:
    """Selects `size` indices of a dim, with a mask of those before `end`."""
    return pl.ds(first, size), first + jnp.arange(size) < end


def _load(ref: Any, rows: Part, columns: Part, *before: Array) -> Array:
    """Loads a tile of the matrix at the leading indices `before`; 0 out of bounds."""
    return triton.load(ref.at[*before, rows[0], columns[0]], mask=rows[1][:, None] & columns[1], other=0)


def _store(ref: Any, tile: Array, rows: Part, columns: Part, *before: Array) -> None:
    triton.store(ref.at[*before, rows[0], columns[0]], tile.astype(ref.dtype), mask=rows[1][:, None] & columns[1])
