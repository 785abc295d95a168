"""Multiplies rows by the weight of their group: experts whose tokens are contiguous.

Letters: R rows, G groups, X summed over, Y made.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array

from src.model.lora import Adapted
from src.model.moe.grouped_codes import GroupedCodes, batched_product, grouped_product
from src.model.products import with_gradient


def grouped_matmul(
    x_RX: Array,
    kernel_GXY: Array | Adapted | GroupedCodes,
    rows_G: Array,
    platform: str,
    transposed: bool = False,
    interpret: bool = False,
) -> Array:
    """Multiplies rows of `x` by the weight of their group: [R, X] and [G, X, Y], or [G, Y, X] `transposed`, to [R, Y].

    The first rows_G[0] rows are group 0's, the next rows_G[1] group 1's, and so on. Rows past the last group cost
    nothing where `platform` has a kernel; their output is undefined, and no gradient comes from them.

    Forward and both gradients are Pallas kernels on TPUs (JAX's megablox) and on GPUs (ours): XLA's compilers would
    make dense products over all groups of the weights' gradient on a TPU, and of all three on a GPU. `interpret` runs
    the kernels without an accelerator, slowly, for tests.
    """
    how = {"rows_G": rows_G, "platform": platform, "transposed": transposed, "interpret": interpret}
    if isinstance(kernel_GXY, Adapted):
        return kernel_GXY.grouped(x_RX, functools.partial(grouped_matmul, **how))
    if isinstance(kernel_GXY, GroupedCodes):
        return grouped_product(x_RX, kernel_GXY, **how)
    kernel_GXY = kernel_GXY.astype(x_RX.dtype)
    if platform == "cpu":
        return jax.lax.ragged_dot(x_RX, kernel_GXY.swapaxes(1, 2) if transposed else kernel_GXY, rows_G)
    kernels = _kernels(platform)

    def run(x_RX: Array, kernel: Array, rows_G: Array) -> tuple[Array, tuple]:
        out_RY = kernels.rows_times_kernel(x_RX, kernel, rows_G, interpret, transposed=transposed)
        return out_RY, (x_RX, kernel, rows_G)

    def gradients(residuals: tuple, gradient_RY: Array) -> tuple[Array, Array, None]:
        x_RX, kernel, rows_G = residuals
        to_x_RX = kernels.rows_times_kernel(gradient_RY, kernel, rows_G, interpret, transposed=not transposed)
        factors = (gradient_RY, x_RX) if transposed else (x_RX, gradient_RY)
        return to_x_RX, kernels.rows_times_rows(*factors, rows_G, interpret), None

    return with_gradient(run, gradients)(x_RX, kernel_GXY, rows_G)


def batched_matmul(x_GRX: Array, kernel_GXY: Array | Adapted | GroupedCodes, transposed: bool = False) -> Array:
    """Multiplies each group's rows by its weight: [G, R, X] and [G, X, Y], or [G, Y, X] `transposed`, to [G, R, Y]."""
    if isinstance(kernel_GXY, Adapted):
        return kernel_GXY.grouped(x_GRX, functools.partial(batched_matmul, transposed=transposed))
    if isinstance(kernel_GXY, GroupedCodes):
        return batched_product(x_GRX, kernel_GXY, transposed)
    return jnp.einsum("grx,gyx->gry" if transposed else "grx,gxy->gry", x_GRX, kernel_GXY.astype(x_GRX.dtype))


def add_by_group(x: Array, bias: Array, factor_R1: Array | None = None, *, rows_G: Array) -> Array:
    """Adds to rows [R, ...] their group's bias [G, ...] times the row's factor; 0 past the last group."""
    group_R = jnp.searchsorted(jnp.cumsum(rows_G), jnp.arange(len(x)), side="right", method="compare_all")
    # A product, since the gradient of a lookup would add to scattered rows.
    of_row_RG = jax.nn.one_hot(group_R, len(rows_G), dtype=x.dtype)
    of_row_RG = of_row_RG if factor_R1 is None else of_row_RG * factor_R1
    bias_RY = of_row_RG @ bias.reshape(len(bias), -1).astype(x.dtype)
    in_group_R = (group_R < len(rows_G)).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(in_group_R, x + bias_RY.reshape(x.shape), 0)


def _kernels(platform: str) -> ModuleType:
    if platform == "tpu":  # imported here: Pallas takes a second
        from src.model.moe import grouped_tpu as kernels
    else:
        from src.model.moe import grouped_gpu as kernels
    return kernels
