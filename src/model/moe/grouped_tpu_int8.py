"""Grouped matmuls of int8 codes on TPUs, summed in int32: Pallas kernels, because JAX's megablox takes no integers.

Letters: R rows, G groups, X summed dim, Y output dim. A tile of rows is visited once for each group with rows in it;
`rows_times_rows` also makes a visit for each empty group, to zero its output.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from src.model.moe.grouped_tpu import padded, row_tile, tile_sizes

Visits = tuple[Any, Any, Any]  # the groups' first rows [G + 1]; each visit's group; each visit's tile of rows


def rows_times_kernel(
    x_RX: Array, kernel: Array, scales_GY: Array, rows_G: Array, dtype: Any, interpret: bool, transposed: bool
) -> Array:
    """Multiplies [R, X] by [G, X, Y], or [G, Y, X] with `transposed`, and by the scales; to [R, Y] of `dtype`.

    Rows past the last group are undefined.
    """
    (R, X), Y, rows = x_RX.shape, scales_GY.shape[1], row_tile(len(x_RX), len(rows_G))
    x, y = tile_sizes(rows, X, Y, 1)
    x_RX, kernel = padded(padded(x_RX, 0, rows), 1, x), padded(kernel, 2 if transposed else 1, x)
    visits, count = _visits(rows_G, len(x_RX), rows, empty_groups=False)
    steps, summed = x_RX.shape[1] // x, (((1,), (1 if transposed else 0,)), ((), ()))

    def program(visits: Visits, x_ref: Any, kernel_ref: Any, scales_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        visit, step = pl.program_id(1), pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += jax.lax.dot_general(x_ref[...], kernel_ref[...], summed, preferred_element_type=jnp.int32)

        @pl.when(step == steps - 1)
        def _() -> None:
            out = sum_ref[...].astype(jnp.float32) * scales_ref[...]
            before = out_ref[...].astype(jnp.float32)
            out_ref[...] = jnp.where(_in_group(visits, visit, (rows, y)), out, before).astype(dtype)

    shape = (None, y, x) if transposed else (None, x, y)
    blocks = [
        pl.BlockSpec((rows, x), lambda column, visit, step, visits: (visits[2][visit], step)),
        pl.BlockSpec(
            shape,
            lambda column, visit, step, visits: (visits[1][visit], *((column, step) if transposed else (step, column))),
        ),
        pl.BlockSpec((None, 1, y), lambda column, visit, step, visits: (visits[1][visit], 0, column)),
    ]
    out_block = pl.BlockSpec((rows, y), lambda column, visit, step, visits: (visits[2][visit], column))
    out = jax.ShapeDtypeStruct((len(x_RX), Y), dtype)
    grid = (pl.cdiv(Y, y), count, steps)
    return _run(program, grid, blocks, out_block, out, interpret)(visits, x_RX, kernel, scales_GY[:, None])[:R]


def rows_times_rows(x_RX: Array, y_RY: Array, scales: Array, rows_G: Array, dtype: Any, interpret: bool) -> Array:
    """Multiplies each group's transposed [rows, X] by its [rows, Y], and by scales that all groups share, to [G, X, Y].

    The scales are [X, 1] or [1, Y].
    """
    (_, X), Y, rows = x_RX.shape, y_RY.shape[1], row_tile(len(x_RX), len(rows_G))
    x, y = tile_sizes(rows, X, Y, 1)
    x_RX, y_RY = padded(x_RX, 0, rows), padded(y_RY, 0, rows)
    visits, count = _visits(rows_G, len(y_RY), rows, empty_groups=True)

    def program(visits: Visits, x_ref: Any, y_ref: Any, scales_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        visit, last = pl.program_id(2), pl.num_programs(2) - 1
        first_rows, groups, _ = visits
        group = groups[visit]

        @pl.when((visit == 0) | (groups[jnp.maximum(visit - 1, 0)] != group))
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(first_rows[group] < first_rows[group + 1])
        def _() -> None:
            in_group = _in_group(visits, visit, (rows, y))
            y_RY = jnp.where(in_group, y_ref[...].astype(jnp.int32), 0).astype(jnp.int8)
            summed = (((0,), (0,)), ((), ()))
            sum_ref[...] += jax.lax.dot_general(x_ref[...], y_RY, summed, preferred_element_type=jnp.int32)

        @pl.when((visit == last) | (groups[jnp.minimum(visit + 1, last)] != group))
        def _() -> None:
            out_ref[...] = (sum_ref[...].astype(jnp.float32) * scales_ref[...]).astype(dtype)

    if scales.shape[1] == 1:
        scales_block = pl.BlockSpec((x, 1), lambda column, row, visit, visits: (row, 0))
    else:
        scales_block = pl.BlockSpec((1, y), lambda column, row, visit, visits: (0, column))
    blocks = [
        pl.BlockSpec((rows, x), lambda column, row, visit, visits: (visits[2][visit], row)),
        pl.BlockSpec((rows, y), lambda column, row, visit, visits: (visits[2][visit], column)),
        scales_block,
    ]
    out_block = pl.BlockSpec((None, x, y), lambda column, row, visit, visits: (visits[1][visit], row, column))
    out = jax.ShapeDtypeStruct((len(rows_G), X, Y), dtype)
    grid = (pl.cdiv(Y, y), pl.cdiv(X, x), count)
    return _run(program, grid, blocks, out_block, out, interpret)(visits, x_RX, y_RY, scales)


def _run(
    program: Callable, grid: tuple, blocks: list[pl.BlockSpec], out_block: Any, out: Any, interpret: bool
) -> Callable:
    tile = [size for size in out_block.block_shape if size]
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=grid,
        in_specs=blocks,
        out_specs=out_block,
        scratch_shapes=[pltpu.VMEM(tile, jnp.int32)],
    )
    # Output columns are independent; a tile's visits, and the steps of a sum, must run in order.
    parameters = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))
    return pl.pallas_call(program, out, grid_spec=specs, compiler_params=parameters, interpret=interpret)


def _visits(rows_G: Array, rows: int, tile: int, empty_groups: bool) -> tuple[Visits, Array]:
    groups = {"group_sizes": rows_G, "start_group": jnp.int32(0), "num_nonzero_groups": len(rows_G)}
    return make_group_metadata(m=rows, tm=tile, visit_empty_groups=empty_groups, **groups)


def _in_group(visits: Visits, visit: Array, shape: tuple[int, int]) -> Array:
    first_rows, groups, tiles = visits
    row = tiles[visit] * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= first_rows[groups[visit]]) & (row < first_rows[groups[visit] + 1])
